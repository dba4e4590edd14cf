/* Functions that check, number, count, commit and lay out the rows of a few slots. `_kernel.c`
   includes this file. */

/* The bounds of a column: the address and the dtype of its values, the number of values per slot,
   and the addresses of the lowest and the highest allowed values of a slot. */
#define CHECK(WORD) WORD(values) WORD(dtype) WORD(count) WORD(low) WORD(high)
typedef struct { CHECK(MEMBER) } Check;
enum { CHECK_WORDS = sizeof(Check) / sizeof(int64_t) };

#define DTYPES(WORD)                                                                               \
    WORD(f4) WORD(f8) WORD(i1) WORD(u1) WORD(i2) WORD(u2) WORD(i4) WORD(u4) WORD(i8) WORD(u8)
#define DTYPE(name) DTYPE_##name,
enum { DTYPES(DTYPE) };

/* Return 1 if every value of the first slots of every column is within its bounds. The slab owns
   the values. The _SlotCheck of each column owns the bounds. */
static int inside(const Table *table, int64_t slots)
{
    int outside = 0;
    const Check *check = (const Check *)table->words, *end = check + table->count / CHECK_WORDS;
    for (; !outside && check < end; check++) {
        const int64_t count = check->count;
#define LOOK(type)                                                                                 \
    {                                                                                              \
        const int64_t slot_nbytes = count * (int64_t)sizeof(type);                                 \
        const type *values = (const type *)span(check->values, 0, slots * slot_nbytes);            \
        const type *low = (const type *)span(check->low, 0, slot_nbytes);                          \
        const type *high = (const type *)span(check->high, 0, slot_nbytes);                        \
        for (int64_t slot = 0; slot < slots && !outside; slot++, values += count)                  \
            for (int64_t i = 0; i < count; i++) /* NaN is within no bounds */                      \
                outside |= !((values[i] >= low[i]) & (values[i] <= high[i]));                      \
        break;                                                                                     \
    }
        switch (check->dtype) {
        case DTYPE_f4: LOOK(float)
        case DTYPE_f8: LOOK(double)
        case DTYPE_i1: LOOK(int8_t)
        case DTYPE_u1: LOOK(uint8_t)
        case DTYPE_i2: LOOK(int16_t)
        case DTYPE_u2: LOOK(uint16_t)
        case DTYPE_i4: LOOK(int32_t)
        case DTYPE_u4: LOOK(uint32_t)
        case DTYPE_i8: LOOK(int64_t)
        case DTYPE_u8: LOOK(uint64_t)
        default: outside = 1; /* the caller checks such a column in Python */
        }
#undef LOOK
    }
    return !outside;
}

/* are_inside(table, slots) */
static PyObject *are_inside(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    if (want(given, 2) < 0)
        return NULL;
    int64_t slots = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() || open_table(args[0], &table, 0) < 0)
        return NULL;
    int all = inside(&table, slots);
    close_table(&table);
    return PyBool_FromLong(all);
}

#define RECORD_NBYTES 4096
#define NUMBER_NBYTES 20

/* Return 1 if a template has exactly `count` placeholders, each "%d", and no other percent
   sign. */
static int can_spell(const char *from, Py_ssize_t length, Py_ssize_t count)
{
    for (const char *end = from + length; from < end; from++)
        if (*from == '%' && (count-- == 0 || *++from != 'd'))
            return 0;
    return count == 0;
}

/* Write a template to `to`, with the numbers in place of its placeholders. SlotRows owns the
   template. `to` is a record on the caller's stack. Return the length of the result. */
static size_t spell(char *to, const char *from, Py_ssize_t length, const int64_t *numbers)
{
    const char *begin = to, *end = from + length;
    while (from < end) {
        if (*from != '%') {
            *to++ = *from++;
            continue;
        }
        char digits[NUMBER_NBYTES], *digit = digits + NUMBER_NBYTES;
        uint64_t left = *numbers < 0 ? 0 - (uint64_t)*numbers : (uint64_t)*numbers;
        do
            *--digit = (char)('0' + left % 10);
        while (left /= 10);
        if (*numbers++ < 0)
            *--digit = '-';
        const size_t nbytes = (size_t)(digits + NUMBER_NBYTES - digit);
        memcpy(to, digit, nbytes);
        to += nbytes;
        from += 2;
    }
    return (size_t)(to - begin);
}

/* The counts that store_slots changes in addition to those of COMMIT. RUN is a block of words of
   the BatchWriter's run, and LEDGER a block of the Ledger. HELD is a block of the Rollout: the
   number of rows of the last slot that are not stored yet, and the number of lanes whose next slot
   is a reset slot. LOG describes the ring of episode records, which has `room` records and starts
   at the address `records`. Python reads and sets the same words by name. */
#define RUN(WORD) WORD(next_id)
#define LEDGER(WORD)                                                                               \
    WORD(slots) WORD(executed) WORD(reset_slots) WORD(stored) WORD(discarded) WORD(carried)        \
    WORD(lost) WORD(random) WORD(policy_calls_on_reset_slots) WORD(ticks) WORD(reset_ticks)        \
    WORD(episodes_complete) WORD(episodes_cut) WORD(incarnation) WORD(respawned)                   \
    WORD(agent_transitions)
#define HELD(WORD) WORD(rows) WORD(resets)
#define LOG(WORD) WORD(noted) WORD(taken) WORD(room) WORD(records) WORD(due)
typedef struct { RUN(MEMBER) } Run;
typedef struct { LEDGER(MEMBER) } Ledger;
typedef struct { HELD(MEMBER) } Held;
typedef struct { LOG(MEMBER) } Log;

/* The blocks of a plan, in this order. `shown` is a copy of the ledger for other threads, which
   changes only after a call has counted all its rows. */
#define BLOCK(WORD) WORD(commit) WORD(run) WORD(ledger) WORD(held) WORD(log) WORD(shown)
typedef struct { BLOCK(MEMBER) } PlanBlocks;
enum { BLOCKS = sizeof(PlanBlocks) / sizeof(int64_t) };

enum { LEDGER_WORDS = sizeof(Ledger) / sizeof(int64_t) };
#define LARGEST_COUNT ((int64_t)1 << 62) /* sums of larger counts may overflow */
/* The numbers of a record: the incarnation, the ledger, the number of open trajectories, and the
   next id. */
enum { RECORD_NUMBERS = 1 + LEDGER_WORDS + 2 };

/* The table of a slab:

     used         the address of the number of complete slots
     marks        the address of the marks of the lanes held in slot 0
     transitions  the address of the marks of transitions, one per lane of each slot
     pending      the address of the marks of the lanes whose next slot is a reset slot, or 0 if
                  there are no reset slots
     by_policy    whether a policy chose the actions
     flowing      the number of pieces that flow

   A PIECE for each piece of memory follows: its address, and the size of a slot in bytes. Pieces
   that flow come first. In such a piece, the observations of the next slot follow those of each
   slot, so that it has one more slot. The other pieces are all other columns. */
#define SLAB(WORD)                                                                                 \
    WORD(used) WORD(marks) WORD(transitions) WORD(pending) WORD(by_policy) WORD(flowing)
typedef struct { SLAB(MEMBER) } Slab;
enum { SLAB_WORDS = sizeof(Slab) / sizeof(int64_t) };

#define PIECE(WORD) WORD(address) WORD(nbytes)
typedef struct { PIECE(MEMBER) } Piece;
enum { PIECE_WORDS = sizeof(Piece) / sizeof(int64_t) };

/* The parts of a plan: the tables, then the record, and then the number of slots of a ring, or
   0. */
#define PLAN(WORD)                                                                                 \
    WORD(numbering) WORD(checks) WORD(slab) WORD(columns) WORD(header) WORD(amounts) WORD(blocks)  \
    WORD(record) WORD(ring)
#define PART(name) P_##name,
enum { PLAN(PART) P_PARTS, P_TABLES = P_record };

/* For each mask of agents, its address and the size of a row in bytes. These words follow the
   amounts of a row. */
#define MASK(WORD) WORD(source) WORD(row_nbytes)
typedef struct { MASK(MEMBER) } Mask;
enum { MASK_WORDS = sizeof(Mask) / sizeof(int64_t) };

/* An open plan. SlotRows owns the plan, and keeps its tables and blocks alive. */
typedef struct {
    Table tables[P_TABLES];
    int opened;
    const Numbering *numbering;
    const Slab *slab;
    Commit *commit;
    Run *run;
    Ledger *ledger, *shown;
    Held *held;
    Log *log;
    const char *record;
    Py_ssize_t length;
    int64_t ring;
} Plan;

static void close_plan(Plan *plan)
{
    while (plan->opened)
        close_table(&plan->tables[--plan->opened]);
}

/* Open a plan. The caller must close it. */
static int open_plan(PyObject *parts, Plan *plan)
{
    static const Py_ssize_t least[] = {NUMBERING_WORDS, 0,            SLAB_WORDS, COLUMN_WORDS,
                                       HEADER_WORDS,    LEDGER_WORDS, BLOCKS};
    plan->opened = 0;
    if (!PyTuple_Check(parts) || PyTuple_Size(parts) != P_PARTS) {
        PyErr_SetString(PyExc_TypeError, "a plan has other parts");
        return -1;
    }
    for (; plan->opened < P_TABLES; plan->opened++) {
        const int part = plan->opened;
        if (open_table(PyTuple_GetItem(parts, part), &plan->tables[part], least[part]) < 0)
            goto failed;
    }
    const PlanBlocks *blocks = (const PlanBlocks *)plan->tables[P_blocks].words;
    plan->numbering = (const Numbering *)plan->tables[P_numbering].words;
    plan->slab = (const Slab *)plan->tables[P_slab].words;
    plan->commit = (Commit *)span(blocks->commit, 0, sizeof(Commit));
    plan->run = (Run *)span(blocks->run, 0, sizeof(Run));
    plan->ledger = (Ledger *)span(blocks->ledger, 0, sizeof(Ledger));
    plan->held = (Held *)span(blocks->held, 0, sizeof(Held));
    plan->log = (Log *)span(blocks->log, 0, sizeof(Log));
    plan->shown = (Ledger *)span(blocks->shown, 0, sizeof(Ledger));
    plan->ring = PyLong_AsLongLong(PyTuple_GetItem(parts, P_ring));
    char *record = NULL;
    if (PyErr_Occurred() ||
        PyBytes_AsStringAndSize(PyTuple_GetItem(parts, P_record), &record, &plan->length) < 0)
        goto failed;
    plan->record = record;
    if (plan->tables[P_amounts].count >= LEDGER_WORDS &&
        (plan->tables[P_amounts].count - LEDGER_WORDS) % MASK_WORDS == 0 &&
        can_spell(record, plan->length, RECORD_NUMBERS))
        return 0;
    PyErr_SetString(PyExc_ValueError, "a plan has other numbers");
failed:
    close_plan(plan);
    return -1;
}

/* The slots of a call. The slab has `used` complete slots, of which those from `first` on are new.
   If `first` is 1, slot 0 has the held rows. There are `made` new transitions. The call stores
   `count` rows and holds the remaining `left` rows of the last slot. `whole` is set if there is
   only one slot and all its lanes are rows. */
typedef struct {
    int64_t used, first, made, count, left;
    int whole;
} Slots;

/* Return 1 if slot `slot` of a lane is a reset slot, because the lane's episode ended in the slot
   before it. For slot 0, return the lane's `pending` mark. Return 0 if there are no reset
   slots. */
static int is_pending(const Plan *plan, int64_t slot, int64_t lane)
{
    const Numbering *t = plan->numbering;
    const int64_t i = (slot - 1) * t->lanes + lane;
    if (!plan->slab->pending)
        return 0;
    return slot ? *span(t->terminated, i, 1) || *span(t->truncated, i, 1)
                : *span(plan->slab->pending, lane, 1);
}

static int is_row(const Plan *plan, int64_t slot, int64_t lane)
{
    if (slot == 0 && plan->held->rows)
        return *span(plan->slab->marks, lane, 1);
    return !is_pending(plan, slot, lane);
}

/* Find the slots of a call that stores `count` rows. Return 0 if the slots have fewer rows, or if
   more rows would remain than the last slot has. */
static int find(const Plan *plan, int64_t used, int64_t count, Slots *slots)
{
    const int64_t lanes = plan->numbering->lanes, held = plan->held->rows;
    int64_t last = held;
    *slots = (Slots){.used = used, .first = held != 0, .count = count};
    if (used < slots->first || used < 1 || count < 1)
        return 0;
    if (!held && used == 1 && count == lanes && !plan->held->resets) {
        slots->made = lanes;
        slots->whole = 1;
        return 1;
    }
    for (int64_t slot = slots->first; slot < used; slot++) {
        last = 0;
        for (int64_t lane = 0; lane < lanes; lane++)
            last += is_row(plan, slot, lane);
        slots->made += last;
    }
    slots->left = held + slots->made - count;
    return 0 <= slots->left && slots->left <= last;
}

/* Mark the rows to store in the slab's `transitions`, and the remaining rows of the last slot in
   its `marks`. */
static void mark(const Plan *plan, const Slots *slots)
{
    const int64_t lanes = plan->numbering->lanes;
    char *rows = span(plan->slab->transitions, 0, slots->used * lanes);
    char *marks = span(plan->slab->marks, 0, lanes);
    for (int64_t slot = 0; slot < slots->used; slot++)
        for (int64_t lane = 0; lane < lanes; lane++)
            rows[slot * lanes + lane] = (char)is_row(plan, slot, lane);
    char *last = rows + (slots->used - 1) * lanes;
    int64_t over = slots->left;
    for (int64_t lane = lanes - 1; lane >= 0; lane--) {
        const int is_left = over > 0 && last[lane];
        marks[lane] = (char)is_left;
        over -= is_left;
        if (is_left)
            last[lane] = 0;
    }
}

/* Return 1 if a trajectory may begin or end in the first slots. */
static int are_eventful(const Numbering *t, int64_t slots)
{
    const int64_t cells = slots * t->lanes;
    const char *terminated = span(t->terminated, 0, cells), *done = span(t->done, 0, cells);
    const char *truncated = span(t->truncated, 0, cells);
    const int64_t *step = (const int64_t *)span(t->state_step, 0, t->lanes * 8);
    int found = 0;
    for (int64_t lane = 0; lane < t->lanes; lane++)
        found |= !step[lane];
    for (int64_t i = 0; i < cells; i++)
        found |= t->makes_done ? terminated[i] | truncated[i] : done[i];
    return found;
}

/* Add the counts of the slots to a ledger. Return 1 if the ledger then balances and has no
   negative or very large count. `amounts` has the number that each stored row adds to each
   count. */
static int add_to(Ledger *ledger, const Plan *plan, const Slots *slots)
{
    const int64_t *amounts = plan->tables[P_amounts].words;
    const int64_t stepped = (slots->used - slots->first) * plan->numbering->lanes;
    const int64_t resets = stepped - slots->made;
    int64_t *count = (int64_t *)ledger;
    ledger->slots += stepped;
    ledger->executed += slots->made;
    ledger->reset_slots += resets;
    if (plan->slab->by_policy)
        ledger->policy_calls_on_reset_slots += resets;
    for (int i = 0; i < LEDGER_WORDS; i++) {
        if (count[i] > LARGEST_COUNT || amounts[i] > LARGEST_COUNT / slots->count)
            return 0;
        count[i] += amounts[i] * slots->count;
        if (count[i] < 0)
            return 0;
    }
    ledger->carried = slots->left;
    return ledger->slots == ledger->executed + ledger->reset_slots &&
           ledger->executed ==
               ledger->stored + ledger->discarded + ledger->carried + ledger->lost;
}

/* Return the number of agents that the masks mark in the first `cells` rows, or only in those rows
   that `rows` marks. The slab owns the masks. */
static int64_t count_agents(const Plan *plan, const char *rows, int64_t cells)
{
    const Table *table = &plan->tables[P_amounts];
    const Mask *mask = (const Mask *)(table->words + LEDGER_WORDS);
    const Mask *end = mask + (table->count - LEDGER_WORDS) / MASK_WORDS;
    int64_t agents = 0;
    for (; mask < end; mask++) {
        const char *row = span(mask->source, 0, cells * mask->row_nbytes);
        for (int64_t cell = 0; cell < cells; cell++, row += mask->row_nbytes)
            for (int64_t i = 0; (!rows || rows[cell]) && i < mask->row_nbytes; i++)
                agents += row[i] != 0;
    }
    return agents;
}

/* Prepare the slab for the next slots. Copy the last observations to its start, or the whole last
   slot if some of its rows are left, and mark the lanes that are reset next. The slab owns the
   rows. Its driver owns the number at `used`. */
static void carry(const Plan *plan, const Slots *slots)
{
    const Table *table = &plan->tables[P_slab];
    const Numbering *t = plan->numbering;
    const Piece *first = (const Piece *)(table->words + SLAB_WORDS);
    const Piece *end = first + (table->count - SLAB_WORDS) / PIECE_WORDS;
    const int64_t last = slots->used - 1;
    char *pending = plan->slab->pending ? span(plan->slab->pending, 0, t->lanes) : NULL;
    if (slots->used > slots->first && pending) {
        plan->held->resets = 0;
        for (int64_t lane = 0; lane < t->lanes; lane++)
            plan->held->resets += pending[lane] = (char)is_pending(plan, slots->used, lane);
    }
    for (const Piece *piece = first; piece < end; piece++) {
        const int flows = piece - first < plan->slab->flowing;
        const size_t size = (size_t)piece->nbytes;
        /* A piece that flows has one more slot, with the observations after the last step. */
        const int64_t there = (slots->used + flows) * piece->nbytes;
        char *begin = span(piece->address, 0, there);
        if (slots->left && last) {
            memcpy(begin, begin + (size_t)last * size, size);
            if (flows)
                memcpy(begin + size, begin + (size_t)slots->used * size, size);
        } else if (!slots->left && flows) {
            memcpy(begin, begin + (size_t)slots->used * size, size);
        }
    }
    if (slots->left)
        memcpy(span(plan->slab->transitions, 0, t->lanes), span(plan->slab->marks, 0, t->lanes),
               (size_t)t->lanes);
    plan->held->rows = slots->left;
    *(int64_t *)span(plan->slab->used, 0, 8) = slots->left != 0;
}

static int64_t slot_of(const Plan *plan)
{
    const int64_t head = plan->commit->head;
    return plan->ring ? head % plan->ring : head;
}

/* Return 1 if the log has room for the largest number of episodes that can end in the slots. */
static int can_note(const Plan *plan, const Slots *slots)
{
    const Log *log = plan->log;
    const int64_t waiting = log->noted - log->taken;
    return 0 <= waiting && log->noted >= 0 &&
           slots->used <= (log->room - waiting) / plan->numbering->lanes;
}

/* Return 1 if `store` can handle the slots, apart from the ledger, which the caller checks. There
   must be room for the rows, a record and the episodes, and all values must be within their
   bounds. The caller must not need to see the rows first. */
static int are_plain(const Plan *plan, const Slots *slots, int64_t room, int watched)
{
    return can_commit(plan->commit) && can_note(plan, slots) &&
           slot_of(plan) + slots->count <= room &&
           plan->length + NUMBER_NBYTES * RECORD_NUMBERS <= RECORD_NBYTES &&
           !(watched && are_eventful(plan->numbering, slots->used)) &&
           inside(&plan->tables[P_checks], slots->used);
}

/* Write the record of a commit, with the counts after the commit. Return its length. */
static size_t write_record(const Plan *plan, const Ledger *ledger, int64_t next_id, char *record)
{
    int64_t numbers[RECORD_NUMBERS], open = 0;
    const Numbering *t = plan->numbering;
    const int64_t *step = (const int64_t *)span(t->state_step, 0, t->lanes * 8);
    for (int64_t lane = 0; lane < plan->numbering->lanes; lane++)
        open += step[lane] != 0;
    numbers[0] = ledger->incarnation;
    memcpy(numbers + 1, ledger, sizeof *ledger);
    numbers[1 + LEDGER_WORDS] = open;
    numbers[2 + LEDGER_WORDS] = next_id;
    return spell(record, plan->record, plan->length, numbers);
}

/* A batch that is laid out from the stored rows. Its table has the index of the column of
   trajectory ids, and the index of the column of the root's done flags. For each column it also
   has the address of the source in the slab, the size of a row in bytes, and the marks: none, at
   the last row of each trajectory in the batch, or at the first row. The column of cuts has marks
   of its own and no source. The second table has the address of each column of the batch.
   SlotRows.batch keeps both tables alive. */
#define BATCH(WORD) WORD(ids) WORD(done)
#define COPY(WORD) WORD(source) WORD(row_nbytes) WORD(marks)
#define MARKS(WORD) WORD(none) WORD(last) WORD(first) WORD(cut)
#define MARKED(name) MARKED_##name,
typedef struct { BATCH(MEMBER) } BatchWords;
typedef struct { COPY(MEMBER) } Copy;
enum { BATCH_WORDS = sizeof(BatchWords) / sizeof(int64_t), COPY_WORDS = sizeof(Copy) / sizeof(int64_t) };
enum { MARKS(MARKED) };
typedef struct {
    Table table, targets;
} Batch;

static void close_batch(Batch *batch)
{
    close_table(&batch->targets);
    close_table(&batch->table);
}

/* Open both tables of a batch. The caller must close them. */
static int open_batch(PyObject *parts, Batch *batch)
{
    if (!PyTuple_Check(parts) || PyTuple_Size(parts) < 2) {
        PyErr_SetString(PyExc_TypeError, "a batch has other parts");
        return -1;
    }
    if (open_table(PyTuple_GetItem(parts, 0), &batch->table, BATCH_WORDS) < 0)
        return -1;
    if (open_table(PyTuple_GetItem(parts, 1), &batch->targets, 0) < 0) {
        close_table(&batch->table);
        return -1;
    }
    const BatchWords *words = (const BatchWords *)batch->table.words;
    const int64_t columns = batch->targets.count;
    if (batch->table.count == BATCH_WORDS + columns * COPY_WORDS &&
        0 <= words->ids && words->ids < columns && 0 <= words->done && words->done < columns)
        return 0;
    close_batch(batch);
    PyErr_SetString(PyExc_ValueError, "a batch has other columns");
    return -1;
}

/* Copy `count` rows of the slab to the columns of a batch: the marked rows, or the first ones if
   `marked` is NULL. Then mark the last and the first row of each trajectory in the batch. */
static void lay_out(const Batch *batch, int64_t count, const Marked *marked)
{
    const BatchWords *words = (const BatchWords *)batch->table.words;
    const int64_t *target = batch->targets.words, *to = target;
    const Copy *first = (const Copy *)(batch->table.words + BATCH_WORDS);
    const Copy *end = first + batch->targets.count;
    for (const Copy *column = first; column < end; column++, to++)
        if (marked && column->source)
            take_marked(span(*to, 0, count * column->row_nbytes),
                        span(column->source, 0, marked->cells * column->row_nbytes),
                        column->row_nbytes, marked);
        else if (column->source)
            memcpy(span(*to, 0, count * column->row_nbytes),
                   span(column->source, 0, count * column->row_nbytes),
                   (size_t)(count * column->row_nbytes));
    const int64_t *ids = (const int64_t *)span(target[words->ids], 0, count * 8);
    const char *done = span(target[words->done], 0, count);
    /* Compute the cuts first, because a later pass marks `done` at the last rows. */
    for (int kind = MARKED_cut; kind > MARKED_none; kind--) {
        to = target;
        for (const Copy *column = first; column < end; column++, to++)
            for (int64_t i = 0; column->marks == kind && i < count; i++) {
                const int last = i + 1 == count || ids[i] != ids[i + 1];
                char *row = span(*to, i * column->row_nbytes, column->row_nbytes);
                if (kind == MARKED_cut)
                    *row = (char)(last && !done[i]);
                else if (kind == MARKED_last ? last : i == 0 || ids[i] != ids[i - 1])
                    memset(row, 1, (size_t)column->row_nbytes);
            }
    }
}

/* Write the episodes that `number` found to the ring of the log, in the order of its records, or
   lane by lane if `by_lane` is set. `stored` is the number of rows that were stored before those
   of this call. The caller adds the episodes to the log's counts. `can_note` found room for them.
   CompiledSlabTable owns the records, and `begun`, which has at least one word per lane. This
   function may use `begun` as scratch memory, because the numbers in it are not needed any more. */
static void note(const Plan *plan, int64_t ended, int64_t stored, int by_lane)
{
    const Numbering *t = plan->numbering;
    const char *record = span(t->episodes, 0, ended * EPISODE_NBYTES);
    /* The place of the next episode of each lane. */
    int64_t *next = (int64_t *)span(t->begun, 0, t->lanes * 8);
    const int32_t first = *(const int32_t *)span(t->lane, 0, 4);
    int32_t lane;
    if (by_lane) {
        int64_t before = 0;
        memset(next, 0, (size_t)t->lanes * sizeof *next);
        for (int64_t i = 0; i < ended; i++) {
            memcpy(&lane, record + i * EPISODE_NBYTES + EPISODE_LANE, sizeof lane);
            REQUIRE(lane >= first && lane - first < t->lanes);
            next[lane - first]++;
        }
        for (int64_t each = 0; each < t->lanes; each++) {
            const int64_t own = next[each];
            next[each] = before;
            before += own;
        }
    }
    for (int64_t i = 0; i < ended; i++, record += EPISODE_NBYTES) {
        int64_t place = i, ended_at;
        if (by_lane) {
            memcpy(&lane, record + EPISODE_LANE, sizeof lane);
            place = next[lane - first]++;
        }
        const int64_t slot = (plan->log->noted + place) % plan->log->room;
        REQUIRE(slot >= 0 && slot < plan->log->room);
        char *to = at(plan->log->records) + slot * EPISODE_NBYTES;
        memcpy(&ended_at, record + EPISODE_ENDED_AT, sizeof ended_at);
        ended_at += stored;
        memcpy(to, record, EPISODE_ENDED_AT);
        memcpy(to + EPISODE_ENDED_AT, &ended_at, sizeof ended_at);
    }
}

/* Number, commit and count the rows, lay out the `batch` if there is one, and return the number of
   episodes that ended. Nothing in this function fails, and no signal handler runs. `ledger` has
   the counts after the call, except for those of episodes and agents. */
static int64_t store(const Plan *plan, const Slots *slots, Ledger *ledger, int64_t version,
                     const Batch *batch)
{
    const Numbering *t = plan->numbering;
    const int64_t cells = slots->used * t->lanes;
    const char *rows = slots->whole ? NULL : span(plan->slab->transitions, 0, cells);
    const Marked in_order = {rows, cells, batch ? t->lanes : 0}, *marked = rows ? &in_order : NULL;
    char record[RECORD_NBYTES];
    for (int64_t i = cells - t->lanes; slots->used > slots->first && i < cells; i++)
        *(int64_t *)span(t->version, i * 8, 8) = version;
    if (rows)
        mark(plan, slots);
    ledger->agent_transitions += count_agents(plan, rows, cells);
    const int64_t ended = number(t, slots->used, rows) & 0xFFFFFFFF;
    const int64_t largest = *(int64_t *)span(t->largest, 0, 8);
    const int64_t next_id = largest < plan->run->next_id ? plan->run->next_id : largest + 1;
    ledger->episodes_complete += ended;
    const size_t length = write_record(plan, ledger, next_id, record);
    commit(&plan->tables[P_columns], slot_of(plan), 0, slots->count, marked,
           (const Header *)plan->tables[P_header].words, plan->commit, record, length);
    if (batch)
        lay_out(batch, slots->count, marked);
    carry(plan, slots);
    if (ended)
        note(plan, ended, plan->ledger->stored, batch && slots->used > 1);
    *plan->ledger = *plan->shown = *ledger;
    plan->run->next_id = next_id;
    plan->log->noted += ended;
    plan->log->due = plan->log->noted - plan->log->taken > plan->log->room / 2;
    return ended;
}

/* store_slots(plan, used, count, room, version, watched, batch) */
static PyObject *store_slots(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Plan plan;
    Slots slots;
    Batch batch;
    if (want(given, 7) < 0)
        return NULL;
    int64_t used = PyLong_AsLongLong(args[1]), count = PyLong_AsLongLong(args[2]);
    int64_t room = PyLong_AsLongLong(args[3]), version = PyLong_AsLongLong(args[4]);
    int watched = PyObject_IsTrue(args[5]);
    const int yields = args[6] != Py_None;
    if (PyErr_Occurred() || open_plan(args[0], &plan) < 0)
        return NULL;
    if (yields && open_batch(args[6], &batch) < 0) {
        close_plan(&plan);
        return NULL;
    }
    int64_t ended = -1;
    if (find(&plan, used, count, &slots) && are_plain(&plan, &slots, room, watched)) {
        Ledger ledger = *plan.ledger;
        if (add_to(&ledger, &plan, &slots))
            ended = store(&plan, &slots, &ledger, version, yields ? &batch : NULL);
    }
    if (yields)
        close_batch(&batch);
    close_plan(&plan);
    return PyLong_FromLongLong(ended);
}
