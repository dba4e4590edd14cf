/* The work on which small steps of environments spend most of their time, one call for each task.

   The extension is optional: `kernel.py` describes every function, and the Python code that runs
   without it. Arguments are tables of numbers, int64 in native order: addresses, sizes and counts
   of arrays. Nothing here knows of NumPy or torch. Python's stable ABI.

   Ownership. This file owns no memory but its stack, and frees nothing. A table is a Python bytes
   object; the buffer that `open_table` takes keeps the table alive during the call. The table does
   not keep the arrays at its addresses alive: the Python objects named below own these, hold them
   for as long as they use the table, and keep every index within bounds.

     table of                the table is kept by     the arrays at its addresses are kept by
     copy_rows, commit_rows  Columns._tables          targets: Columns.arrays, maps of the files;
                                                      sources: FixedRows.arrays, the slab's columns
     gather_rows, appends    Columns._tables          the same
     gather_rows, reads      Room.table               targets: Room.arrays; sources: Columns.arrays
     pack_runs               Packing._table           Packing: its room, and the columns' arrays
     the header              Header.addresses         Header._map, the map of its file
     number_slots            SlabRows._table          SlabRows (columns, outputs), LaneState (state)
     are_inside              _SlotChecks.table        _SlotCheck: values in the slab, and bounds
     SLAB, in store_slots    SlotRows.slab            the slab (rows, transitions), its driver's board
                                                      (used), Rollout (held, marks), lanes (pending)
     masks of agents, in store_slots  SlotRows.amounts  the slab
     a batch, in store_slots SlotRows.batch           targets: its tensors, which SlotRows.batch keeps
                                                      too; sources: the slab's columns
     store_slots             SlotRows.plan: a tuple   as the tables in the plan, listed above
     the blocks of counts    SlotRows.plan            Header (commit), BatchWriter (run), Ledger (two),
                                                      Rollout (held), EpisodeRing (log; it also has
                                                      its records, and PlainSlots keeps it); SlotRows
                                                      refers to all six
     put_step                a step of a Stepper      the slab, whose slot the step writes
     step_lanes              LanesInTurn              LanesInTurn (rewards, flags, the lane)
                                                      LaneResults (finals, entries of infos)
     set_leaves, renew_sums  SumTree._table           SumTree: its leaves, and the levels above them
     put_leaves, draw_rows   the same                 the same
     put_priorities          the same                 the same; powers: Powers._table; numbers in a
                                                      tuple: the caller's tensors
     spots_of, rows_at, ...  LaneBlocks._table        LaneBlocks: its piles, shelves and tail
     walk_onward, bounds_of  the same                 the same */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    Py_buffer buffer;
    const int64_t *words;
    Py_ssize_t count;
} Table;

/* Open a buffer of whole int64 words, at least `least` of them. The caller must release it. */
static int open_table(PyObject *object, Table *table, Py_ssize_t least)
{
    if (PyObject_GetBuffer(object, &table->buffer, PyBUF_SIMPLE) < 0)
        return -1;
    table->words = (const int64_t *)table->buffer.buf;
    table->count = table->buffer.len / (Py_ssize_t)sizeof(int64_t);
    if (table->count < least) {
        PyBuffer_Release(&table->buffer);
        PyErr_SetString(PyExc_ValueError, "a table is too short");
        return -1;
    }
    return 0;
}

static int want(Py_ssize_t got, Py_ssize_t wanted)
{
    if (got == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, got);
    return -1;
}

static inline char *at(int64_t address)
{
    return (char *)(intptr_t)address;
}

#ifdef __GNUC__
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) (void)(address)
#endif
#define LINE_NBYTES 64
#define FETCHED_NBYTES 4096 /* of a row: the processor fetches the rest by itself */

static inline void fetch(const char *row, int64_t size)
{
    for (int64_t byte = 0; byte < size && byte < FETCHED_NBYTES; byte += LINE_NBYTES)
        FETCH(row + byte);
}

/* Words that Python makes or reads by name. A list of names gives the members of a struct, and is
   exported by `name_words`: Python's own list must be alike, which `kernel.py` makes sure of when it
   imports the extension. */
#define MEMBER(name) int64_t name;
#define NAME(name) #name " "

/* Copy rows of `size` bytes from source[index[i]] to target[i]. The rows lie anywhere in memory, so
   that later rows are fetched while one is copied, far enough ahead that each arrives in time.
   Target, source and index belong to the caller's table and buffer. */
static void gather(char *target, const char *source, int64_t size, const int64_t *index,
                   Py_ssize_t count)
{
    Py_ssize_t ahead = size > 512 ? 4 : 16;
    for (Py_ssize_t i = 0; i < ahead && i < count; i++)
        fetch(source + index[i] * size, size);
#define ROWS(bytes)                                                                                \
    for (Py_ssize_t i = 0; i < count; i++) {                                                       \
        if (i + ahead < count)                                                                     \
            fetch(source + index[i + ahead] * (bytes), bytes);                                     \
        memcpy(target + i * (bytes), source + index[i] * (bytes), (size_t)(bytes));                \
    }                                                                                              \
    break
    switch (size) { /* the compiler copies a row of known size by one move */
    case 1: ROWS(1);
    case 2: ROWS(2);
    case 4: ROWS(4);
    case 8: ROWS(8);
    case 16: ROWS(16);
    case 32: ROWS(32);
    default: ROWS(size);
    }
#undef ROWS
}

enum { TARGET, SOURCE, ROW_NBYTES, COLUMN_WORDS };

/* Let other threads run during a large copy; for a small one that takes as long as copying. The
   Columns that call keep their maps alive meanwhile, even if another thread maps the files again;
   the caller keeps the other arrays alive. */
static PyThreadState *let_others_run(const Table *table, int64_t count)
{
    int64_t row = 0;
    for (Py_ssize_t i = ROW_NBYTES; i < table->count; i += COLUMN_WORDS)
        row += table->words[i];
    return row * count > (1 << 16) ? PyEval_SaveThread() : NULL;
}

/* Copy rows [first, first + count) of every source to slots from `slot` on. The targets are the
   storage's maps, which Columns owns; the sources are the slab, which FixedRows keeps alive. */
static void copy_columns(const Table *table, int64_t slot, int64_t first, int64_t count)
{
    PyThreadState *others = let_others_run(table, count);
    const int64_t *column = table->words, *end = column + table->count;
    for (; column + COLUMN_WORDS <= end; column += COLUMN_WORDS) {
        int64_t size = column[ROW_NBYTES];
        memcpy(at(column[TARGET]) + slot * size, at(column[SOURCE]) + first * size,
               (size_t)(count * size));
    }
    if (others)
        PyEval_RestoreThread(others);
}

/* Rows that are marked, of the first `cells`, in the order of memory; or, of slots of so many `lanes`,
   lane by lane. */
typedef struct {
    const char *marks;
    int64_t cells, lanes;
} Marked;

/* Copy the marked rows of `size` bytes one after the other. */
static void take_marked(char *target, const char *source, int64_t size, const Marked *rows)
{
    if (rows->lanes && rows->lanes < rows->cells) {
        for (int64_t lane = 0; lane < rows->lanes; lane++)
            for (int64_t cell = lane; cell < rows->cells; cell += rows->lanes)
                if (rows->marks[cell]) {
                    memcpy(target, source + cell * size, (size_t)size);
                    target += size;
                }
        return;
    }
    for (int64_t first = 0, stop; first < rows->cells; first = stop + 1) {
        for (stop = first; stop < rows->cells && rows->marks[stop];)
            stop++;
        memcpy(target, source + first * size, (size_t)((stop - first) * size));
        target += (stop - first) * size;
    }
}

/* Copy the marked rows, `count` ones, of every source to slots from `slot` on. */
static void copy_marked(const Table *table, int64_t slot, int64_t count, const Marked *rows)
{
    PyThreadState *others = let_others_run(table, count);
    const int64_t *column = table->words, *end = column + table->count;
    for (; column + COLUMN_WORDS <= end; column += COLUMN_WORDS)
        take_marked(at(column[TARGET]) + slot * column[ROW_NBYTES], at(column[SOURCE]),
                    column[ROW_NBYTES], rows);
    if (others)
        PyEval_RestoreThread(others);
}

/* copy_rows(table, slot, first, count) */
static PyObject *copy_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    if (want(given, 4) < 0)
        return NULL;
    int64_t slot = PyLong_AsLongLong(args[1]);
    int64_t first = PyLong_AsLongLong(args[2]);
    int64_t count = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred() || open_table(args[0], &table, COLUMN_WORDS) < 0)
        return NULL;
    copy_columns(&table, slot, first, count);
    PyBuffer_Release(&table.buffer);
    Py_RETURN_NONE;
}

/* Store a word that other processes may read at any time: a reader that sees it also sees every
   earlier store. `where` is in the map of the header, which Header owns. */
static void publish(char *where, uint64_t word)
{
    __atomic_store_n((uint64_t *)where, word, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Return a count with its check bits. */
static uint64_t word_of(int64_t count)
{
    uint32_t bits = 0;
    for (int i = 0; i < 6; i++) {
        bits ^= (uint32_t)((count >> (8 * i)) & 0xFF) << 8;
        for (int bit = 0; bit < 8; bit++)
            bits = bits & 0x8000 ? bits << 1 ^ 0x1021 : bits << 1;
    }
    return (uint64_t)count | (uint64_t)(bits & 0xFFFF) << 48;
}

/* Return a CRC-32 continued over further bytes. Eight are taken at a time: table k has the effect of
   a byte that k others follow. */
static uint32_t checksum(uint32_t crc, const char *bytes, size_t length)
{
    static uint32_t tables[8][256];
    const uint8_t *byte = (const uint8_t *)bytes;
    if (!tables[7][255]) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t word = i;
            for (int bit = 0; bit < 8; bit++)
                word = word & 1 ? word >> 1 ^ 0xEDB88320u : word >> 1;
            tables[0][i] = word;
        }
        for (int k = 1; k < 8; k++)
            for (int i = 0; i < 256; i++)
                tables[k][i] = tables[k - 1][i] >> 8 ^ tables[0][tables[k - 1][i] & 0xFF];
    }
    crc = ~crc;
    for (; length >= 8; length -= 8, byte += 8) {
        uint32_t mixed = 0;
        for (int i = 0; i < 4; i++)
            mixed ^= tables[7 - i][(crc >> 8 * i ^ byte[i]) & 0xFF] ^ tables[3 - i][byte[4 + i]];
        crc = mixed;
    }
    while (length--)
        crc = crc >> 8 ^ tables[0][(crc ^ *byte++) & 0xFF];
    return ~crc;
}

static char *little_endian(char *to, uint64_t number, int nbytes)
{
    for (int i = 0; i < nbytes; i++)
        *to++ = (char)(number >> (8 * i));
    return to;
}

/* The counts of a storage that its writer keeps: a block of words, which Header owns. */
#define COMMIT(WORD) WORD(head) WORD(reserve) WORD(floor) WORD(sequence) WORD(commits)
typedef struct { COMMIT(MEMBER) } Commit;

/* Addresses in the map of the header, which Header owns. */
enum { RESERVE_WORD, HEAD_WORD, RECORD_SLOTS, HEADER_WORDS = RECORD_SLOTS + 2 };
#define SEAL_NBYTES 28

/* Return whether the last commit was not cut off, and no other process writes. */
static int can_commit(const Commit *known)
{
    return known->head >= 0 && known->reserve == known->head;
}

/* Commit rows: store `reserve`, copy the rows, write the record, and store `head`; then count them.
   The record's sequence, the first word of its seal, is written last. The rows are `count` ones from
   `first` on, or the marked ones. */
static void commit(const Table *table, int64_t slot, int64_t first, int64_t count,
                   const Marked *marked, const int64_t *header, Commit *known, const char *record,
                   size_t length)
{
    Commit after = *known;
    after.reserve = after.head += count;
    after.sequence++;
    after.commits++;
    char seal[SEAL_NBYTES], *to = at(header[RECORD_SLOTS + after.sequence % 2]);
    char *end = little_endian(seal, (uint64_t)after.sequence, 8);
    end = little_endian(end, (uint64_t)after.head, 8);
    end = little_endian(end, length, 8);
    little_endian(end, checksum(checksum(0, seal, 24), record, length), 4);
    uint64_t sequence;
    const uint64_t word = word_of(after.head);
    publish(at(header[RESERVE_WORD]), word);
    if (marked)
        copy_marked(table, slot, count, marked);
    else
        copy_columns(table, slot, first, count);
    memcpy(to + SEAL_NBYTES, record, length);
    memcpy(to + sizeof sequence, seal + sizeof sequence, SEAL_NBYTES - sizeof sequence);
    memcpy(&sequence, seal, sizeof sequence);
    publish(to, sequence);
    publish(at(header[HEAD_WORD]), word);
    *known = after;
}

/* commit_rows(table, slot, first, count, header, known, record). `known` is the address of a block
   of COMMIT; the three buffers are held until the end of the call. */
static PyObject *commit_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table, header;
    Py_buffer record;
    if (want(given, 7) < 0)
        return NULL;
    int64_t slot = PyLong_AsLongLong(args[1]);
    int64_t first = PyLong_AsLongLong(args[2]);
    int64_t count = PyLong_AsLongLong(args[3]);
    int64_t known = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred() || open_table(args[0], &table, COLUMN_WORDS) < 0)
        return NULL;
    if (open_table(args[4], &header, HEADER_WORDS) < 0)
        goto header_failed;
    if (PyObject_GetBuffer(args[6], &record, PyBUF_SIMPLE) < 0)
        goto record_failed;
    const int can = can_commit((const Commit *)at(known));
    if (can)
        commit(&table, slot, first, count, NULL, header.words, (Commit *)at(known),
               (const char *)record.buf, (size_t)record.len);
    PyBuffer_Release(&record);
    PyBuffer_Release(&header.buffer);
    PyBuffer_Release(&table.buffer);
    return PyBool_FromLong(can);
record_failed:
    PyBuffer_Release(&header.buffer);
header_failed:
    PyBuffer_Release(&table.buffer);
    return NULL;
}

/* gather_rows(table, slot, index, rows): copy rows of every column to slots from `slot` on; raise
   IndexError, with nothing copied, if an index is not below `rows`. The index is an array of the
   caller; its buffer is held until the end of the call. */
static PyObject *gather_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table, index;
    if (want(given, 4) < 0)
        return NULL;
    int64_t slot = PyLong_AsLongLong(args[1]);
    int64_t rows = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred() || open_table(args[0], &table, COLUMN_WORDS) < 0)
        return NULL;
    if (open_table(args[2], &index, 0) < 0) {
        PyBuffer_Release(&table.buffer);
        return NULL;
    }
    int beyond = 0;
    for (Py_ssize_t i = 0; i < index.count; i++)
        beyond |= (uint64_t)index.words[i] >= (uint64_t)rows;
    if (beyond) {
        PyBuffer_Release(&index.buffer);
        PyBuffer_Release(&table.buffer);
        PyErr_SetString(PyExc_IndexError, "a row is not there");
        return NULL;
    }
    PyThreadState *others = let_others_run(&table, index.count);
    const int64_t *column = table.words, *end = column + table.count;
    for (; column + COLUMN_WORDS <= end; column += COLUMN_WORDS)
        gather(at(column[TARGET]) + slot * column[ROW_NBYTES], at(column[SOURCE]),
               column[ROW_NBYTES], index.words, index.count);
    if (others)
        PyEval_RestoreThread(others);
    PyBuffer_Release(&index.buffer);
    PyBuffer_Release(&table.buffer);
    Py_RETURN_NONE;
}

/* Rows that lie side by side. */
typedef struct {
    int64_t slot, count;
} Stretch;

/* Copy runs one after the other; return the end of the copy. */
static char *copy_runs(char *target, const char *source, int64_t size, const Stretch *run,
                       const Stretch *end)
{
#define AHEAD 8
#define RUNS(bytes)                                                                                \
    for (; run < end; run++) {                                                                     \
        if (end - run > AHEAD)                                                                     \
            fetch(source + run[AHEAD].slot * (bytes), run[AHEAD].count * (bytes));                 \
        if (run->count == 1)                                                                       \
            memcpy(target, source + run->slot * (bytes), (size_t)(bytes));                         \
        else                                                                                       \
            memcpy(target, source + run->slot * (bytes), (size_t)(run->count * (bytes)));          \
        target += run->count * (bytes);                                                            \
    }                                                                                              \
    break
    switch (size) { /* as in `gather` */
    case 1: RUNS(1);
    case 2: RUNS(2);
    case 4: RUNS(4);
    case 8: RUNS(8);
    case 16: RUNS(16);
    case 32: RUNS(32);
    default: RUNS(size);
    }
#undef RUNS
    return target;
}

/* Return how many rows there are in runs, `-1` if one is not among the first `rows`, or if they are
   more than `most`. */
static int64_t rows_in(const Stretch *run, Py_ssize_t count, int64_t rows, int64_t most)
{
    int64_t found = 0;
    for (const Stretch *end = run + count; run < end; run++) {
        if (run->slot < 0 || run->count < 1 || run->count > most - found ||
            run->count > rows - run->slot)
            return -1;
        found += run->count;
    }
    return found;
}

/* pack_runs(table, runs, parts, rows, most): copy runs to the target of the first column, part by
   part, and of each part column by column. Raise IndexError, with nothing copied, if runs or parts
   are not within bounds. Runs and parts are arrays of the caller; their buffers are held until the
   end of the call. */
static PyObject *pack_runs(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table, runs, parts;
    if (want(given, 5) < 0)
        return NULL;
    int64_t rows = PyLong_AsLongLong(args[3]);
    int64_t most = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred() || open_table(args[0], &table, COLUMN_WORDS) < 0)
        return NULL;
    if (open_table(args[1], &runs, 0) < 0)
        goto runs_failed;
    if (open_table(args[2], &parts, 0) < 0)
        goto parts_failed;
    const Stretch *run = (const Stretch *)runs.words;
    Py_ssize_t left = runs.count / 2;
    const int64_t count = rows_in(run, left, rows, most);
    for (Py_ssize_t i = 0; i < parts.count && left >= 0; i++)
        left = parts.words[i] < 0 || parts.words[i] > left ? -1 : left - parts.words[i];
    const int inside = count >= 0 && left == 0;
    if (inside) {
        PyThreadState *others = let_others_run(&table, count);
        char *target = at(table.words[TARGET]);
        for (Py_ssize_t i = 0; i < parts.count; run += parts.words[i++]) {
            const int64_t *column = table.words, *end = column + table.count;
            for (; column + COLUMN_WORDS <= end; column += COLUMN_WORDS)
                target = copy_runs(target, at(column[SOURCE]), column[ROW_NBYTES], run,
                                   run + parts.words[i]);
        }
        if (others)
            PyEval_RestoreThread(others);
    }
    PyBuffer_Release(&parts.buffer);
    PyBuffer_Release(&runs.buffer);
    PyBuffer_Release(&table.buffer);
    if (inside)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_IndexError, "a row is not there");
    return NULL;
parts_failed:
    PyBuffer_Release(&runs.buffer);
runs_failed:
    PyBuffer_Release(&table.buffer);
    return NULL;
}

/* The numbering table: sizes, flags, and addresses. SlabRows makes and keeps it; it holds the columns
   up to `lane`, and owns the outputs `begun`, `episodes` and `largest`. LaneState owns the arrays
   named `state`. */
#define NUMBERING(WORD)                                                                            \
    WORD(lanes) WORD(stride) WORD(terminated) WORD(truncated) WORD(done) WORD(next_valid)          \
    WORD(makes_done) WORD(makes_truncated) WORD(reward) WORD(reward_is_double) WORD(rewards)       \
    WORD(version) WORD(traj_ids) WORD(step) WORD(lane) WORD(state_id) WORD(state_step)             \
    WORD(state_return) WORD(state_version) WORD(state_length) WORD(begun) WORD(episodes)           \
    WORD(largest)
typedef struct { NUMBERING(MEMBER) } Numbering;
enum { NUMBERING_WORDS = sizeof(Numbering) / sizeof(int64_t) };

/* The fields of the episode log, which follow one another. */
#define EPISODE(WORD)                                                                              \
    WORD(traj_id) WORD(lane) WORD(return) WORD(length) WORD(terminated) WORD(first_version)        \
    WORD(last_version) WORD(ended_at)
enum { EPISODE_LANE = 8, EPISODE_ENDED_AT = 45, EPISODE_NBYTES = 53 };

/* Write an episode that ended, with `nth` among the rows that are numbered as its last one. */
static void tell(char *to, int64_t id, int32_t lane, double total, int64_t length, char terminated,
                 int64_t first, int64_t last, int64_t nth)
{
    memcpy(to, &id, 8);
    memcpy(to + EPISODE_LANE, &lane, 4);
    memcpy(to + 12, &total, 8);
    memcpy(to + 20, &length, 8);
    to[28] = terminated;
    memcpy(to + 29, &first, 8);
    memcpy(to + 37, &last, 8);
    memcpy(to + EPISODE_ENDED_AT, &nth, 8);
}

/* Return the sum of the rewards of row `i`, of which a lane has as many as the table says. */
static double reward_of(const Numbering *t, int64_t i)
{
    const float *narrow = (const float *)at(t->reward) + i * t->rewards;
    const double *wide = (const double *)at(t->reward) + i * t->rewards;
    double sum = t->reward_is_double ? *wide : (double)*narrow;
    for (int64_t nth = 1; nth < t->rewards; nth++)
        sum += t->reward_is_double ? wide[nth] : (double)narrow[nth];
    return sum;
}

/* Number the rows of the first slots, and return begun << 32 | ended. It writes to the columns of
   the slab, to the arrays of LaneState, and to the outputs of SlabRows. */
static int64_t number(const Numbering *t, int64_t slots, const char *taken)
{
    const int64_t lanes = t->lanes;
    const char *terminated = at(t->terminated);
    char *truncated = at(t->truncated), *done = at(t->done);
    char *valid = t->next_valid ? at(t->next_valid) : NULL;
    const int64_t *version = (const int64_t *)at(t->version);
    int64_t *ids = (int64_t *)at(t->traj_ids), *steps = (int64_t *)at(t->step);
    int64_t *id = (int64_t *)at(t->state_id), *step = (int64_t *)at(t->state_step);
    double *total = (double *)at(t->state_return);
    int64_t *first = (int64_t *)at(t->state_version), *length = (int64_t *)at(t->state_length);
    int64_t *begun = (int64_t *)at(t->begun);
    const int32_t *number = (const int32_t *)at(t->lane);
    int64_t begins = 0, ends = 0, i = 0, rows = 0, largest = -1;

    for (int64_t slot = 0; slot < slots; slot++) {
        for (int64_t lane = 0; lane < lanes; lane++, i++) {
            if (t->makes_truncated)
                truncated[i] = done[i] && !terminated[i];
            if (t->makes_done)
                done[i] = terminated[i] || truncated[i];
            if (valid)
                valid[i] = !done[i];
            ids[i] = id[lane];
            steps[i] = step[lane];
            if (taken && !taken[i])
                continue;
            rows++;
            if (!length[lane]) {
                first[lane] = version[i];
                begun[begins++] = i;
            }
            if (!step[lane] && id[lane] > largest)
                largest = id[lane];
            step[lane]++;
            length[lane]++;
            total[lane] += reward_of(t, i);
            if (done[i]) {
                tell(at(t->episodes) + EPISODE_NBYTES * ends++, id[lane], number[i], total[lane],
                     length[lane], terminated[i], first[lane], version[i], rows);
                id[lane] += t->stride;
                step[lane] = length[lane] = 0;
                total[lane] = 0.0;
            }
        }
    }
    *(int64_t *)at(t->largest) = largest;
    return begins << 32 | ends;
}

/* number_slots(table, slots, taken) */
static PyObject *number_slots(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Py_buffer mask;
    if (want(given, 3) < 0)
        return NULL;
    int64_t slots = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() || open_table(args[0], &table, NUMBERING_WORDS) < 0)
        return NULL;
    const Numbering *t = (const Numbering *)table.words;
    int64_t found = -1;
    if (args[2] == Py_None) {
        found = number(t, slots, NULL);
    } else if (PyObject_GetBuffer(args[2], &mask, PyBUF_SIMPLE) == 0) {
        if (mask.len < slots * t->lanes)
            PyErr_SetString(PyExc_ValueError, "a mask is too short");
        else
            found = number(t, slots, (const char *)mask.buf);
        PyBuffer_Release(&mask);
    }
    PyBuffer_Release(&table.buffer);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(found);
}

enum { VALUES, KIND, SLOT_COUNT, LOW, HIGH, CHECK_WORDS };
enum { F32, F64, I8, U8, I16, U16, I32, U32, I64, U64 };

/* Return whether every value of the first slots of every column is within its bounds. The values
   belong to the slab, the bounds to the _SlotCheck of each column. */
static int inside(const Table *table, int64_t slots)
{
    int outside = 0;
    const int64_t *check = table->words, *end = check + table->count;
    for (; !outside && check + CHECK_WORDS <= end; check += CHECK_WORDS) {
        int64_t count = check[SLOT_COUNT];
#define LOOK(type)                                                                                 \
    {                                                                                              \
        const type *values = (const type *)at(check[VALUES]);                                      \
        const type *low = (const type *)at(check[LOW]), *high = (const type *)at(check[HIGH]);     \
        for (int64_t slot = 0; slot < slots && !outside; slot++, values += count)                  \
            for (int64_t i = 0; i < count; i++) /* NaN is within no bounds */                      \
                outside |= !((values[i] >= low[i]) & (values[i] <= high[i]));                      \
        break;                                                                                     \
    }
        switch (check[KIND]) {
        case F32: LOOK(float)
        case F64: LOOK(double)
        case I8: LOOK(int8_t)
        case U8: LOOK(uint8_t)
        case I16: LOOK(int16_t)
        case U16: LOOK(uint16_t)
        case I32: LOOK(int32_t)
        case U32: LOOK(uint32_t)
        case I64: LOOK(int64_t)
        case U64: LOOK(uint64_t)
        default: outside = 1; /* then the caller checks the column in Python */
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
    PyBuffer_Release(&table.buffer);
    return PyBool_FromLong(all);
}

#define RECORD_NBYTES 4096
#define NUMBER_NBYTES 20

/* Return whether a template has `count` places for numbers, "%d" each. */
static int can_spell(const char *from, Py_ssize_t length, Py_ssize_t count)
{
    for (const char *end = from + length; from < end; from++)
        if (*from == '%' && (count-- == 0 || *++from != 'd'))
            return 0;
    return count == 0;
}

/* Write such a template, which SlotRows owns, with the numbers in their places to `to`, a record on
   the caller's stack; return its length. */
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

/* The counts that slots change beside those of COMMIT: blocks of words of the BatchWriter's run, of
   the Ledger, of the Rollout, which holds rows of the last slot that are not stored yet, and lanes
   whose next slot is a reset, and of a ring of `room` records of episodes, which lie at the address
   `records`. Python reads and sets the same words by name. */
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

/* The blocks of a plan, in this order. `shown` has the words of the ledger as other threads read them:
   only after all of a call is counted. */
#define BLOCK(WORD) WORD(commit) WORD(run) WORD(ledger) WORD(held) WORD(log) WORD(shown)
typedef struct { BLOCK(MEMBER) } PlanBlocks;
enum { BLOCKS = sizeof(PlanBlocks) / sizeof(int64_t) };

enum { LEDGER_WORDS = sizeof(Ledger) / sizeof(int64_t) };
#define LARGEST_COUNT ((int64_t)1 << 62) /* sums of larger ones might not fit */
/* The numbers of a record: the incarnation, the ledger, open trajectories, and the next id. */
enum { RECORD_NUMBERS = 1 + LEDGER_WORDS + 2 };

/* The table of a slab. `used` is the address of the number of complete slots; `marks` of the lanes
   held in slot 0, `transitions` of a mark for each lane of each slot, `pending` of the lanes whose
   next slot is a reset, or 0 if no slot is one. `by_policy` says whether a policy chose the actions.
   Then come an address and the bytes of a slot for each piece of memory: `flowing` ones, in which a
   slot's observations are followed by the next ones, and those of all other columns. */
#define SLAB(WORD)                                                                                 \
    WORD(used) WORD(marks) WORD(transitions) WORD(pending) WORD(by_policy) WORD(flowing)
typedef struct { SLAB(MEMBER) } Slab;
enum { SLAB_WORDS = sizeof(Slab) / sizeof(int64_t) };

enum { P_NUMBERING, P_CHECKS, P_SLAB, P_COLUMNS, P_HEADER, P_AMOUNTS, P_BLOCKS, P_TABLES,
       P_RECORD = P_TABLES, P_RING, P_PARTS };

/* Behind the amounts of a row: for each mask of agents its address and the bytes of a row. */
enum { M_SOURCE, M_NBYTES, MASK_WORDS };

/* A plan while it is used. SlotRows owns the plan, and keeps its tables and blocks alive. */
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
        PyBuffer_Release(&plan->tables[--plan->opened].buffer);
}

/* Open a plan, which the caller must close. */
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
    const PlanBlocks *blocks = (const PlanBlocks *)plan->tables[P_BLOCKS].words;
    plan->numbering = (const Numbering *)plan->tables[P_NUMBERING].words;
    plan->slab = (const Slab *)plan->tables[P_SLAB].words;
    plan->commit = (Commit *)at(blocks->commit);
    plan->run = (Run *)at(blocks->run);
    plan->ledger = (Ledger *)at(blocks->ledger);
    plan->held = (Held *)at(blocks->held);
    plan->log = (Log *)at(blocks->log);
    plan->shown = (Ledger *)at(blocks->shown);
    plan->ring = PyLong_AsLongLong(PyTuple_GetItem(parts, P_RING));
    char *record = NULL;
    if (PyErr_Occurred() ||
        PyBytes_AsStringAndSize(PyTuple_GetItem(parts, P_RECORD), &record, &plan->length) < 0)
        goto failed;
    plan->record = record;
    if (plan->tables[P_AMOUNTS].count >= LEDGER_WORDS &&
        (plan->tables[P_AMOUNTS].count - LEDGER_WORDS) % MASK_WORDS == 0 &&
        can_spell(record, plan->length, RECORD_NUMBERS))
        return 0;
    PyErr_SetString(PyExc_ValueError, "a plan has other numbers");
failed:
    close_plan(plan);
    return -1;
}

/* The slots of a call. Of the first `used` ones of the slab those from `first` on are new; slot 0 has
   the held rows if `first` is 1. `made` transitions are new, `count` rows are to be stored, and
   `left` ones of the last slot are held. `whole`: all lanes of the one slot are rows. */
typedef struct {
    int64_t used, first, made, count, left;
    int whole;
} Slots;

/* Return whether the next slot of a lane is a reset, after the slot before `slot`. */
static int is_pending(const Plan *plan, int64_t slot, int64_t lane)
{
    const Numbering *t = plan->numbering;
    const int64_t i = (slot - 1) * t->lanes + lane;
    if (!plan->slab->pending)
        return 0;
    return slot ? at(t->terminated)[i] || at(t->truncated)[i] : at(plan->slab->pending)[lane];
}

static int is_row(const Plan *plan, int64_t slot, int64_t lane)
{
    if (slot == 0 && plan->held->rows)
        return at(plan->slab->marks)[lane];
    return !is_pending(plan, slot, lane);
}

/* Find the slots of a call that stores `count` rows; return 0 if they are too few, or are more than
   the last slot can hold. */
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

/* Mark the rows of the slots in the slab's transitions, and those that are left in its marks. */
static void mark(const Plan *plan, const Slots *slots)
{
    const int64_t lanes = plan->numbering->lanes;
    char *rows = at(plan->slab->transitions), *marks = at(plan->slab->marks);
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

/* Return whether a trajectory begins or ends in the first slots, or may do so. */
static int are_eventful(const Numbering *t, int64_t slots)
{
    const char *terminated = at(t->terminated), *truncated = at(t->truncated), *done = at(t->done);
    const int64_t *step = (const int64_t *)at(t->state_step);
    int found = 0;
    for (int64_t lane = 0; lane < t->lanes; lane++)
        found |= !step[lane];
    for (int64_t i = 0; i < slots * t->lanes; i++)
        found |= t->makes_done ? terminated[i] | truncated[i] : done[i];
    return found;
}

/* Add the counts of slots to a ledger; return whether it balances then and none is negative.
   `amounts` are those of a row that is stored. */
static int add_to(Ledger *ledger, const Plan *plan, const Slots *slots)
{
    const int64_t *amounts = plan->tables[P_AMOUNTS].words;
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

/* Return how many agents the masks mark in the first `cells` rows, or in those of them that `rows`
   marks. The slab owns the masks. */
static int64_t count_agents(const Plan *plan, const char *rows, int64_t cells)
{
    const Table *table = &plan->tables[P_AMOUNTS];
    const int64_t *mask = table->words + LEDGER_WORDS, *end = table->words + table->count;
    int64_t agents = 0;
    for (; mask < end; mask += MASK_WORDS) {
        const char *row = at(mask[M_SOURCE]);
        for (int64_t cell = 0; cell < cells; cell++, row += mask[M_NBYTES])
            for (int64_t i = 0; (!rows || rows[cell]) && i < mask[M_NBYTES]; i++)
                agents += row[i] != 0;
    }
    return agents;
}

/* Let the last observations, and the whole last slot if rows of it are left, begin the slab, and say
   which lanes are reset next. The slab owns the rows; its driver owns the number at `used`. */
static void carry(const Plan *plan, const Slots *slots)
{
    const Table *table = &plan->tables[P_SLAB];
    const Numbering *t = plan->numbering;
    const int64_t *memory = table->words + SLAB_WORDS, *end = table->words + table->count;
    const int64_t last = slots->used - 1;
    char *pending = at(plan->slab->pending);
    if (slots->used > slots->first && pending) {
        plan->held->resets = 0;
        for (int64_t lane = 0; lane < t->lanes; lane++)
            plan->held->resets += pending[lane] = (char)is_pending(plan, slots->used, lane);
    }
    for (int64_t piece = 0; memory + 2 <= end; memory += 2, piece++) {
        const size_t size = (size_t)memory[1];
        char *begin = at(memory[0]);
        if (slots->left && last) {
            memcpy(begin, begin + (size_t)last * size, size);
            if (piece < plan->slab->flowing)
                memcpy(begin + size, begin + (size_t)slots->used * size, size);
        } else if (!slots->left && piece < plan->slab->flowing) {
            memcpy(begin, begin + (size_t)slots->used * size, size);
        }
    }
    if (slots->left)
        memcpy(at(plan->slab->transitions), at(plan->slab->marks), (size_t)t->lanes);
    plan->held->rows = slots->left;
    *(int64_t *)at(plan->slab->used) = slots->left != 0;
}

static int64_t slot_of(const Plan *plan)
{
    const int64_t head = plan->commit->head;
    return plan->ring ? head % plan->ring : head;
}

/* Return whether the log has room for as many episodes as may end in the slots. */
static int can_note(const Plan *plan, const Slots *slots)
{
    const Log *log = plan->log;
    const int64_t waiting = log->noted - log->taken;
    return 0 <= waiting && log->noted >= 0 &&
           slots->used <= (log->room - waiting) / plan->numbering->lanes;
}

/* Return whether the slots need nothing more than `store`, but for the ledger: there is room for the
   rows, a record and episodes, values are within their bounds, and the caller need not see them
   before. */
static int are_plain(const Plan *plan, const Slots *slots, int64_t room, int watched)
{
    return can_commit(plan->commit) && can_note(plan, slots) &&
           slot_of(plan) + slots->count <= room &&
           plan->length + NUMBER_NBYTES * RECORD_NUMBERS <= RECORD_NBYTES &&
           !(watched && are_eventful(plan->numbering, slots->used)) &&
           inside(&plan->tables[P_CHECKS], slots->used);
}

/* Write the record of a commit, in which the counts are those after it; return its length. */
static size_t write_record(const Plan *plan, const Ledger *ledger, int64_t next_id, char *record)
{
    int64_t numbers[RECORD_NUMBERS], open = 0;
    const int64_t *step = (const int64_t *)at(plan->numbering->state_step);
    for (int64_t lane = 0; lane < plan->numbering->lanes; lane++)
        open += step[lane] != 0;
    numbers[0] = ledger->incarnation;
    memcpy(numbers + 1, ledger, sizeof *ledger);
    numbers[1 + LEDGER_WORDS] = open;
    numbers[2 + LEDGER_WORDS] = next_id;
    return spell(record, plan->record, plan->length, numbers);
}

/* A batch that is laid out from the rows that are stored. Its table says which column has the ids of
   trajectories, and which the done flags of the root; then for each column the source in the slab,
   the bytes of a row, and its marks: none, at the last row of a trajectory in the batch, or at the
   first, or the column of cuts, which has no source. The other table has the address of each column
   of the batch. SlotRows.batch keeps both. */
enum { B_IDS, B_DONE, BATCH_WORDS };
enum { B_SOURCE, B_NBYTES, B_MARKS, B_COLUMN_WORDS };
enum { B_NONE, B_LAST, B_FIRST, B_CUT };
typedef struct {
    Table table, targets;
} Batch;

static void close_batch(Batch *batch)
{
    PyBuffer_Release(&batch->targets.buffer);
    PyBuffer_Release(&batch->table.buffer);
}

/* Open both tables of a batch, which the caller must close. */
static int open_batch(PyObject *parts, Batch *batch)
{
    if (!PyTuple_Check(parts) || PyTuple_Size(parts) < 2) {
        PyErr_SetString(PyExc_TypeError, "a batch has other parts");
        return -1;
    }
    if (open_table(PyTuple_GetItem(parts, 0), &batch->table, BATCH_WORDS) < 0)
        return -1;
    if (open_table(PyTuple_GetItem(parts, 1), &batch->targets, 0) < 0) {
        PyBuffer_Release(&batch->table.buffer);
        return -1;
    }
    const int64_t *words = batch->table.words, columns = batch->targets.count;
    if (batch->table.count == BATCH_WORDS + columns * B_COLUMN_WORDS &&
        0 <= words[B_IDS] && words[B_IDS] < columns && 0 <= words[B_DONE] && words[B_DONE] < columns)
        return 0;
    close_batch(batch);
    PyErr_SetString(PyExc_ValueError, "a batch has other columns");
    return -1;
}

/* Copy `count` rows of the slab, the first ones or the marked ones, to the columns of a batch, and
   mark the last and the first row that it has of each trajectory. */
static void lay_out(const Batch *batch, int64_t count, const Marked *marked)
{
    const int64_t *words = batch->table.words, *target = batch->targets.words;
    const int64_t *first = words + BATCH_WORDS, *end = words + batch->table.count, *to = target;
    for (const int64_t *column = first; column < end; column += B_COLUMN_WORDS, to++)
        if (marked && column[B_SOURCE])
            take_marked(at(*to), at(column[B_SOURCE]), column[B_NBYTES], marked);
        else if (column[B_SOURCE])
            memcpy(at(*to), at(column[B_SOURCE]), (size_t)(count * column[B_NBYTES]));
    const int64_t *ids = (const int64_t *)at(target[words[B_IDS]]);
    const char *done = at(target[words[B_DONE]]);
    for (int kind = B_CUT; kind > B_NONE; kind--) { /* cuts first: done is marked after them */
        to = target;
        for (const int64_t *column = first; column < end; column += B_COLUMN_WORDS, to++)
            for (int64_t i = 0; column[B_MARKS] == kind && i < count; i++) {
                const int last = i + 1 == count || ids[i] != ids[i + 1];
                char *row = at(*to) + i * column[B_NBYTES];
                if (kind == B_CUT)
                    *row = (char)(last && !done[i]);
                else if (kind == B_LAST ? last : i == 0 || ids[i] != ids[i - 1])
                    memset(row, 1, (size_t)column[B_NBYTES]);
            }
    }
}

/* Write the episodes that `number` found ended to the ring of the log, in its order or lane by lane;
   `stored` rows were stored before theirs. They are not counted there yet. `can_note` found room for
   them. SlabRows owns the records that are read, and `begun`, which has a word a lane at least, and
   whose own numbers are not needed here. */
static void note(const Plan *plan, int64_t ended, int64_t stored, int by_lane)
{
    const Numbering *t = plan->numbering;
    const char *record = at(t->episodes);
    int64_t *next = (int64_t *)at(t->begun); /* of each lane: the place of its next episode */
    const int32_t first = *(const int32_t *)at(t->lane);
    int32_t lane;
    if (by_lane) {
        int64_t before = 0;
        memset(next, 0, (size_t)t->lanes * sizeof *next);
        for (int64_t i = 0; i < ended; i++) {
            memcpy(&lane, record + i * EPISODE_NBYTES + EPISODE_LANE, sizeof lane);
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
        char *to = at(plan->log->records) + slot * EPISODE_NBYTES;
        memcpy(&ended_at, record + EPISODE_ENDED_AT, sizeof ended_at);
        ended_at += stored;
        memcpy(to, record, EPISODE_ENDED_AT);
        memcpy(to + EPISODE_ENDED_AT, &ended_at, sizeof ended_at);
    }
}

/* Number, commit and count the rows, lay the `batch` out where there is one, and return how many
   episodes ended. Nothing fails here, and no handler of a signal runs. `ledger` has the counts after
   it, but for episodes and agents. */
static int64_t store(const Plan *plan, const Slots *slots, Ledger *ledger, int64_t version,
                     const Batch *batch)
{
    const Numbering *t = plan->numbering;
    const int64_t cells = slots->used * t->lanes;
    const char *rows = slots->whole ? NULL : at(plan->slab->transitions);
    const Marked in_order = {rows, cells, batch ? t->lanes : 0}, *marked = rows ? &in_order : NULL;
    char record[RECORD_NBYTES];
    for (int64_t i = cells - t->lanes; slots->used > slots->first && i < cells; i++)
        ((int64_t *)at(t->version))[i] = version;
    if (rows)
        mark(plan, slots);
    ledger->agent_transitions += count_agents(plan, rows, cells);
    const int64_t ended = number(t, slots->used, rows) & 0xFFFFFFFF;
    const int64_t largest = *(int64_t *)at(t->largest);
    const int64_t next_id = largest < plan->run->next_id ? plan->run->next_id : largest + 1;
    ledger->episodes_complete += ended;
    const size_t length = write_record(plan, ledger, next_id, record);
    commit(&plan->tables[P_COLUMNS], slot_of(plan), 0, slots->count, marked,
           plan->tables[P_HEADER].words, plan->commit, record, length);
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

/* Open buffers of which the last is written to; the caller must release them. Return -1, with none of
   them open, if one cannot be. */
static int open_buffers(PyObject *const *objects, Py_buffer *buffers, int count)
{
    for (int i = 0; i < count; i++) {
        const int flags = i == count - 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(objects[i], &buffers[i], flags) < 0) {
            while (i-- > 0)
                PyBuffer_Release(&buffers[i]);
            return -1;
        }
    }
    return 0;
}

static void release_buffers(Py_buffer *buffers, int count)
{
    while (count-- > 0)
        PyBuffer_Release(&buffers[count]);
}

/* same_rows(one, other, same, skip): write to `same`, one byte each, whether rows of two arrays have
   the same bytes, but for the first `skip` of a row of `one` and the last of a row of `other`. The
   arrays belong to the caller; their buffers are held until the end of the call. */
static PyObject *same_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer buffers[3];
    if (want(given, 4) < 0)
        return NULL;
    const int64_t skip = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred() || open_buffers(args, buffers, 3) < 0)
        return NULL;
    const int64_t rows = buffers[2].len, row = rows ? buffers[0].len / rows : 0;
    const int fit = buffers[0].len == rows * row && buffers[1].len == rows * row && skip >= 0 &&
                    (rows == 0 || skip <= row);
    if (fit) {
        const char *one = (const char *)buffers[0].buf + skip, *other = (const char *)buffers[1].buf;
        char *same = (char *)buffers[2].buf;
        PyThreadState *others = rows * row > (1 << 16) ? PyEval_SaveThread() : NULL;
        for (int64_t i = 0; i < rows; i++, one += row, other += row)
            same[i] = memcmp(one, other, (size_t)(row - skip)) == 0;
        if (others)
            PyEval_RestoreThread(others);
    }
    release_buffers(buffers, 3);
    if (!fit) {
        PyErr_SetString(PyExc_ValueError, "rows and marks differ in number or bytes");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* nth_marked(marks, uniform, chosen): write to `chosen`, int64, for each row of marks, one byte
   each, the index of a marked entry, drawn by a double in [0, 1); of any entry if none is marked.
   The arrays belong to the caller; their buffers are held until the end of the call. */
static PyObject *nth_marked(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer buffers[3];
    if (want(given, 3) < 0 || open_buffers(args, buffers, 3) < 0)
        return NULL;
    const Py_buffer *marks = &buffers[0], *uniform = &buffers[1], *chosen = &buffers[2];
    const int64_t rows = chosen->len / (Py_ssize_t)sizeof(int64_t);
    const int64_t choices = rows ? marks->len / rows : 0;
    const int fit =
        choices * rows == marks->len && (Py_ssize_t)(rows * sizeof(double)) == uniform->len;
    const uint8_t *row = (const uint8_t *)marks->buf;
    for (int64_t i = 0; fit && i < rows; i++, row += choices) {
        int64_t count = 0, index = 0;
        for (int64_t k = 0; k < choices; k++)
            count += row[k] != 0;
        const int any = count == 0;
        if (any)
            count = choices;
        int64_t left = (int64_t)(((const double *)uniform->buf)[i] * (double)count);
        if (left > count - 1) /* rounding may make the product as large as the count itself */
            left = count - 1;
        for (; index < choices - 1; index++)
            if ((any || row[index]) && left-- == 0)
                break;
        ((int64_t *)chosen->buf)[i] = index;
    }
    release_buffers(buffers, 3);
    if (!fit) {
        PyErr_SetString(PyExc_ValueError, "marks, numbers and choices differ in their rows");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Return whether a buffer has this format, as in the struct module, and these dimensions. */
static int is_like(const Py_buffer *view, const char *format, int64_t ndim, const int64_t *shape)
{
    if (view->ndim != ndim || view->format == NULL || strcmp(view->format, format) != 0)
        return 0;
    for (int64_t i = 0; i < ndim; i++)
        if (view->shape[i] != shape[i])
            return 0;
    return 1;
}

/* Write reward `i` to those of a slot at `to`. Return 0 if it becomes infinite, 0 or another integer
   there: the caller then raises or warns in Python. */
static int put_reward(char *to, int as_doubles, int64_t i, double reward)
{
    const float narrow = (float)reward;
    if (as_doubles) {
        ((double *)(void *)to)[i] = reward;
        return 1;
    }
    if (fabs(reward) > 16777216.0) { /* float32 holds every integer up to here */
        if (isfinite(reward) && (!isfinite(narrow) || (narrow != reward && floor(reward) == reward)))
            return 0;
    } else if (narrow == 0 && reward != 0) {
        return 0;
    }
    ((float *)(void *)to)[i] = narrow;
    return 1;
}

/* Copy rewards to the slab at `to`; return 0 if they are no floats, or one is not written. */
static int put_rewards(char *to, int as_doubles, const Py_buffer *view, const int64_t *lanes)
{
    const int from_doubles = is_like(view, "d", 1, lanes);
    if (!from_doubles && !is_like(view, "f", 1, lanes))
        return 0;
    for (int64_t i = 0; i < *lanes; i++) {
        const double reward =
            from_doubles ? ((const double *)view->buf)[i] : ((const float *)view->buf)[i];
        if (!put_reward(to, as_doubles, i, reward))
            return 0;
    }
    return 1;
}

/* The table of a slot: the addresses of rewards, terminated and truncated, whether rewards are
   doubles, and lanes; then for each observation its address, that of the one that the policy sees
   next (or 0), and its dimensions with their number before them. The slab owns the addresses. */
enum { S_REWARD, S_TERMINATED, S_TRUNCATED, S_DOUBLES, S_LANES, SLOT_WORDS };
enum { O_ROW, O_ROOT, O_NDIM, O_SHAPE };
#define STEP_BUFFER (PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)

/* Flags of lanes, which the slab owns. */
typedef struct {
    const char *terminated, *truncated;
    int64_t lanes;
} Flags;

static int has_ended(const Flags *of, int64_t lane)
{
    return of->terminated[lane] || of->truncated[lane];
}

/* Write one observation to its row, and to the row that the policy sees next; or, of lanes that have
   `ended`, the final one to its row alone. Return 0 if it is not as its words say, or after an error. */
static int put_observation(const int64_t *words, PyObject *format, PyObject *seen, const Flags *ended)
{
    Py_buffer view;
    const char *wanted = PyBytes_AsString(format);
    if (wanted == NULL || PyObject_GetBuffer(seen, &view, STEP_BUFFER) < 0)
        return 0;
    char *row = at(words[O_ROW]);
    const int fits = is_like(&view, wanted, words[O_NDIM], words + O_SHAPE);
    if (fits && ended) {
        const int64_t size = view.len / ended->lanes;
        for (int64_t lane = 0; lane < ended->lanes; lane++)
            if (has_ended(ended, lane))
                memmove(row + lane * size, (char *)view.buf + lane * size, (size_t)size);
    } else if (fits) {
        memmove(row, view.buf, (size_t)view.len);
        if (words[O_ROOT])
            memcpy(at(words[O_ROOT]), row, (size_t)view.len);
    }
    PyBuffer_Release(&view);
    return fits;
}

/* Write all observations of a step, one for each format; or, of lanes that have `ended`, final ones. */
static int put_observations(const Table *table, PyObject *formats, PyObject *observations,
                            const Flags *ended)
{
    const int64_t *words = table->words + SLOT_WORDS, *end = table->words + table->count;
    const Py_ssize_t count = PyTuple_Size(formats);
    if (count < 0 || PySequence_Size(observations) != count)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (words + O_SHAPE > end || words + O_SHAPE + words[O_NDIM] > end) {
            PyErr_SetString(PyExc_ValueError, "a table is too short");
            return 0;
        }
        if (ended && !words[O_ROOT]) /* it is the first one of the next episode too */
            return 0;
        PyObject *seen = PySequence_GetItem(observations, i);
        const int put = seen && put_observation(words, PyTuple_GetItem(formats, i), seen, ended);
        Py_XDECREF(seen);
        if (!put)
            return 0;
        words += O_SHAPE + words[O_NDIM];
    }
    return 1;
}

/* Clear the error of an object without such a buffer, which the caller reads by NumPy. Return -1 after
   any other error. */
static int cleared(void)
{
    if (!PyErr_Occurred())
        return 0;
    if (!PyErr_ExceptionMatches(PyExc_BufferError) && !PyErr_ExceptionMatches(PyExc_ValueError) &&
        !PyErr_ExceptionMatches(PyExc_TypeError))
        return -1;
    PyErr_Clear();
    return 0;
}

/* put_step(table, formats, observations, reward, terminated, truncated, final): write the arrays of a
   step to a slot; return how many lanes ended, or -1 if an array is not as the table says. The arrays
   of the step are held by their buffers while they are read. */
static PyObject *put_step(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Py_buffer views[3];
    int opened = 0;
    int64_t ended = -1;
    if (want(given, 7) < 0 || open_table(args[0], &table, SLOT_WORDS) < 0)
        return NULL;
    const int64_t *t = table.words, *lanes = t + S_LANES;
    for (; opened < 3; opened++)
        if (PyObject_GetBuffer(args[3 + opened], &views[opened], STEP_BUFFER) < 0)
            goto done;
    const Py_buffer *over = &views[1], *cut = &views[2];
    if (is_like(over, "?", 1, lanes) && is_like(cut, "?", 1, lanes)
        && put_rewards(at(t[S_REWARD]), t[S_DOUBLES] != 0, &views[0], lanes)
        && put_observations(&table, args[1], args[2], NULL)) {
        const Flags flags = {at(t[S_TERMINATED]), at(t[S_TRUNCATED]), *lanes};
        memmove(at(t[S_TERMINATED]), over->buf, (size_t)*lanes);
        memmove(at(t[S_TRUNCATED]), cut->buf, (size_t)*lanes);
        int64_t ends = 0;
        for (int64_t lane = 0; lane < *lanes; lane++)
            ends += has_ended(&flags, lane);
        if (!ends || args[6] == Py_None || put_observations(&table, args[1], args[6], &flags))
            ended = ends;
    }
done:
    while (opened)
        PyBuffer_Release(&views[--opened]);
    PyBuffer_Release(&table.buffer);
    return cleared() < 0 ? NULL : PyLong_FromLongLong(ended);
}

/* Return whether a lane is marked; NULL marks all. */
static int is_marked(const Py_buffer *marks, int64_t lane)
{
    return marks->buf == NULL || ((const char *)marks->buf)[lane];
}

enum { I_ROW, I_VALUES, I_GIVEN, I_HAVE, I_LANES, I_BUFFERS };

/* Write an entry of infos to the lanes of its column; `fill` is the row of a lane without it. Return 0
   if arrays are not alike, or a lane lacks an entry that it must have. */
static int write_lanes(const Py_buffer *views, int has_values, const char *fill, Py_ssize_t filled)
{
    const Py_buffer *row = &views[I_ROW], *values = &views[I_VALUES], *given = &views[I_GIVEN];
    if (row->ndim < 1 || row->shape[0] < 1 || (fill == NULL) != (given->buf == NULL))
        return 0;
    const int64_t lanes = row->shape[0], size = row->len / lanes;
    if (fill != NULL && filled != size)
        return 0;
    if (has_values && (values->buf == NULL ||
                       !is_like(values, row->format, row->ndim, (const int64_t *)row->shape)))
        return 0;
    for (int i = I_GIVEN; i < I_BUFFERS; i++)
        if (views[i].buf != NULL && !is_like(&views[i], "?", 1, &lanes))
            return 0;
    for (int64_t lane = 0; lane < lanes; lane++) {
        if (!is_marked(&views[I_LANES], lane))
            continue;
        const int has = has_values && is_marked(&views[I_HAVE], lane);
        if (!has && fill == NULL)
            return 0;
        const char *from = has ? (const char *)values->buf + lane * size : fill;
        memmove((char *)row->buf + lane * size, from, (size_t)size);
        if (given->buf != NULL)
            ((char *)given->buf)[lane] = (char)has;
    }
    return 1;
}

/* put_entry(row, given, fill, found, lanes). The buffers are held until the end of the call. */
static PyObject *put_entry(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer views[I_BUFFERS];
    char *fill = NULL;
    Py_ssize_t filled = 0;
    int put = 0, opened = 0;
    if (want(given, 5) < 0)
        return NULL;
    PyObject *found = args[3];
    const int has_values = found != Py_None;
    if (has_values && (!PyTuple_Check(found) || PyTuple_Size(found) != 2)) {
        PyErr_SetString(PyExc_TypeError, "an entry has other parts");
        return NULL;
    }
    PyObject *arrays[I_BUFFERS] = {args[0], has_values ? PyTuple_GetItem(found, 0) : Py_None, args[1],
                                   has_values ? PyTuple_GetItem(found, 1) : Py_None, args[4]};
    if (args[2] != Py_None && PyBytes_AsStringAndSize(args[2], &fill, &filled) < 0)
        return NULL;
    for (; opened < I_BUFFERS; opened++) {
        const int writes = opened == I_ROW || opened == I_GIVEN;
        views[opened].buf = NULL;
        views[opened].obj = NULL;
        if (arrays[opened] != Py_None &&
            PyObject_GetBuffer(arrays[opened], &views[opened],
                               writes ? STEP_BUFFER | PyBUF_WRITABLE : STEP_BUFFER) < 0)
            break;
    }
    if (opened == I_BUFFERS)
        put = write_lanes(views, has_values, fill, filled);
    while (opened)
        PyBuffer_Release(&views[--opened]);
    return cleared() < 0 ? NULL : PyBool_FromLong(put);
}

enum { L_REWARD, L_TERMINATED, L_TRUNCATED, L_LANE, L_FINALS, L_LANES, L_MODE, L_NBYTES, L_SHAPE };
enum { DISABLED, NEXT_STEP, SAME_STEP }; /* how a lane that ended is reset */

/* Return the values of an environment as a tuple of `wanted` of them, which the caller owns. The
   reference `returned` is taken over. */
static PyObject *tuple_of(PyObject *returned, Py_ssize_t wanted)
{
    PyObject *parts = returned == NULL ? NULL : PySequence_Tuple(returned);
    Py_XDECREF(returned);
    if (parts != NULL && PyTuple_Size(parts) != wanted) {
        PyErr_Format(PyExc_ValueError, "expected %zd values from an environment, got %zd", wanted,
                     PyTuple_Size(parts));
        Py_DECREF(parts);
        return NULL;
    }
    return parts;
}

enum { R_BOOL, R_FLOAT32, R_REWARD, R_TERMINATED, R_TRUNCATED, R_FINAL, R_OVERWRITTEN, R_TELL, R_ENTRIES };
enum { OF_STEP, OF_LAST, OF_RESET }; /* the call that gave an info */

/* Return whether an object has the NumPy type at `kind`, which is read directly. LanesInTurn keeps
   the tuple of readers. */
static int is_of(PyObject *object, PyObject *readers, Py_ssize_t kind)
{
    return (PyObject *)Py_TYPE(object) == PyTuple_GetItem(readers, kind);
}

/* Read a reward: floats and small integers directly, anything else by the reader's function. */
static int as_double(PyObject *object, PyObject *readers, double *number)
{
    int beyond = 0;
    PyObject *made = NULL;
    if (PyFloat_Check(object)) {
        *number = PyFloat_AsDouble(object);
        if (fabs(*number) <= FLT_MAX || !isfinite(*number))
            return 0;
    } else if (PyLong_Check(object)) {
        const long long whole = PyLong_AsLongLongAndOverflow(object, &beyond);
        *number = (double)whole;
        if (!beyond && whole >= -16777216 && whole <= 16777216) /* float32 holds these */
            return whole == -1 && PyErr_Occurred() ? -1 : 0;
    } else if (is_of(object, readers, R_FLOAT32)) {
        made = PyNumber_Float(object);
    }
    if (made == NULL && !PyErr_Occurred())
        made = PyObject_CallFunctionObjArgs(PyTuple_GetItem(readers, R_REWARD), object, NULL);
    if (made == NULL)
        return -1;
    *number = PyFloat_AsDouble(made);
    Py_DECREF(made);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Read a flag: bools directly, anything else by the reader's function; -1 after an error. */
static int as_flag(PyObject *object, PyObject *readers, Py_ssize_t reader)
{
    if (object == Py_True || object == Py_False)
        return object == Py_True;
    if (is_of(object, readers, R_BOOL))
        return PyObject_IsTrue(object);
    PyObject *made = PyObject_CallFunctionObjArgs(PyTuple_GetItem(readers, reader), object, NULL);
    const int flag = made == NULL ? -1 : PyObject_IsTrue(made);
    Py_XDECREF(made);
    return flag;
}

/* Copy an object to the row `to` of an array of ours; return 0 if it is not an array of this dtype
   and shape, which is at the end of a table, from word `from` on, after the bytes of a row. Errors of
   its buffer are cleared: then the caller copies it by NumPy. */
static int put_row(char *to, PyObject *seen, PyObject *name, PyObject *dtype, const Table *table,
                   Py_ssize_t from)
{
    const int64_t *shape = table->words + from + 1;
    const Py_ssize_t ndim = table->count - from - 1;
    Py_buffer view;
    PyObject *found = PyObject_GetAttr(seen, name);
    int same = found == dtype;
    Py_XDECREF(found);
    if (same && PyObject_GetBuffer(seen, &view, PyBUF_C_CONTIGUOUS) == 0) {
        same = view.ndim == ndim && view.len == table->words[from];
        for (Py_ssize_t i = 0; same && i < ndim; i++)
            same = view.shape[i] == shape[i];
        if (same)
            memmove(to, view.buf, (size_t)view.len);
        PyBuffer_Release(&view);
    } else {
        same = 0;
    }
    if (!same && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    return same;
}

/* Return whether two objects are arrays without a byte in common, as far as that is quickly seen. */
static int are_apart(PyObject *one, PyObject *other)
{
    Py_buffer mine, theirs;
    int apart = 0;
    if (PyObject_GetBuffer(one, &mine, PyBUF_SIMPLE) == 0) {
        if (PyObject_GetBuffer(other, &theirs, PyBUF_SIMPLE) == 0) {
            const char *first = mine.buf, *second = theirs.buf;
            apart = first + mine.len <= second || second + theirs.len <= first;
            PyBuffer_Release(&theirs);
        }
        PyBuffer_Release(&mine);
    }
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    return apart;
}

/* The arguments of a step of all lanes. LanesInTurn and the caller of step_lanes own the objects. */
typedef struct {
    Table table;
    PyObject *dtype, *readers, *seen, *step, *name;
} Lanes;

/* An entry of infos is a tuple: its path, its dtype, and a table of its column and of the column that
   says where it was given (0: none, and it must be given). LaneResults keeps both. */
enum { E_PATH, E_DTYPE, E_TABLE, E_PARTS };
enum { E_COLUMN, E_GIVEN, E_KIND, E_NBYTES };
enum { E_OTHER, E_FLOAT64, E_INT64, E_EMPTY }; /* empty: a dictionary, and no column */

/* Write a value to the column of an entry; return 0 if that takes NumPy, or a look at the value. */
static int write_entry(const Table *table, int64_t lane, PyObject *value, PyObject *name,
                       PyObject *dtype)
{
    const int64_t *t = table->words;
    char *to = at(t[E_COLUMN]) + lane * t[E_NBYTES];
    int beyond = 0;
    if (t[E_KIND] == E_FLOAT64 && PyFloat_CheckExact(value)) {
        *(double *)to = PyFloat_AsDouble(value);
    } else if (t[E_KIND] == E_INT64 && PyLong_CheckExact(value)) {
        const long long whole = PyLong_AsLongLongAndOverflow(value, &beyond);
        if (beyond)
            return 0;
        *(int64_t *)to = whole;
    } else if (t[E_KIND] == E_EMPTY) {
        return PyDict_CheckExact(value) && PyDict_Size(value) == 0;
    } else if (!put_row(to, value, name, dtype, table, E_NBYTES)) {
        return 0;
    }
    if (t[E_GIVEN])
        at(t[E_GIVEN])[lane] = 1;
    return 1;
}

/* Write an entry of an info, or leave it out; return 0 if it is not plain, or is missing. */
static int take_entry(const Lanes *the, int64_t lane, PyObject *info, PyObject *entry)
{
    Table table;
    if (!PyTuple_Check(entry) || PyTuple_Size(entry) != E_PARTS)
        return 0;
    PyObject *path = PyTuple_GetItem(entry, E_PATH);
    for (Py_ssize_t i = 0; info != NULL && i < PyTuple_Size(path); i++) {
        if (!PyDict_CheckExact(info))
            return 0;
        info = PyDict_GetItemWithError(info, PyTuple_GetItem(path, i));
    }
    if (PyErr_Occurred() || open_table(PyTuple_GetItem(entry, E_TABLE), &table, E_NBYTES + 1) < 0)
        return 0;
    int taken = info == NULL && table.words[E_GIVEN];
    if (info != NULL) {
        Py_INCREF(info);
        taken = write_entry(&table, lane, info, the->name, PyTuple_GetItem(entry, E_DTYPE));
        Py_DECREF(info);
    }
    PyBuffer_Release(&table.buffer);
    return taken;
}

/* Write the entries of an info that are columns: plain ones of steps here, others by the reader.
   Return 0, or -1 after an error. */
static int hand_on(const Lanes *the, int64_t lane, PyObject *info, int of)
{
    PyObject *entries = PyTuple_GetItem(the->readers, R_ENTRIES);
    const Py_ssize_t count = PyTuple_Size(entries);
    int taken = count <= 0 || of == OF_STEP;
    for (Py_ssize_t i = 0; taken && i < count; i++)
        taken = take_entry(the, lane, info, PyTuple_GetItem(entries, i));
    if (taken || PyErr_Occurred())
        return taken && !PyErr_Occurred() ? 0 : -1;
    PyObject *made = PyObject_CallFunction(PyTuple_GetItem(the->readers, R_TELL), "LOi",
                                           (long long)lane, info, of);
    Py_XDECREF(made);
    return made == NULL ? -1 : 0;
}

/* Reset a lane; its observation goes to the list `seen`, which owns it. Return 0, or -1. */
static int reset_lane(const Lanes *the, int64_t lane, PyObject *env, int of)
{
    PyObject *parts = tuple_of(PyObject_CallMethod(env, "reset", NULL), 2);
    if (parts == NULL)
        return -1;
    PyObject *obs = PyTuple_GetItem(parts, 0);
    Py_INCREF(obs);
    const int failed = PyList_SetItem(the->seen, lane, obs) < 0 ||
        hand_on(the, lane, PyTuple_GetItem(parts, 1), of) < 0;
    Py_DECREF(parts);
    return failed ? -1 : 0;
}

/* Copy the final observation `last` of a lane, and reset the lane. The caller holds a reference to
   `last`, which the reset might drop; it must not overwrite it. Return 0, or -1 after an error. */
static int finish_lane(const Lanes *the, int64_t lane, PyObject *env, PyObject *last)
{
    const int64_t *t = the->table.words;
    char *to = at(t[L_FINALS]) + lane * t[L_NBYTES];
    PyObject *made = NULL;
    if (!t[L_FINALS] || !put_row(to, last, the->name, the->dtype, &the->table, L_NBYTES)) {
        if (PyErr_Occurred())
            return -1;
        made = PyObject_CallFunction(PyTuple_GetItem(the->readers, R_FINAL), "LO", (long long)lane,
                                     last);
        if (made == NULL)
            return -1;
        Py_DECREF(made);
    }
    if (reset_lane(the, lane, env, OF_RESET) < 0)
        return -1;
    PyObject *first = PyList_GetItem(the->seen, lane);
    if (first == NULL)
        return -1;
    Py_INCREF(first);
    int failed = 0;
    if (!are_apart(last, first)) {
        failed = PyErr_Occurred() != NULL;
        if (!failed) {
            made = PyObject_CallFunction(PyTuple_GetItem(the->readers, R_OVERWRITTEN), "LOO",
                                         (long long)lane, last, first);
            failed = made == NULL;
            Py_XDECREF(made);
        }
    }
    Py_DECREF(first);
    return failed ? -1 : 0;
}

/* Step one lane, or with `reset` reset it; return 0, or -1 after an error. The list `seen` of
   LanesInTurn owns the observation afterwards; the numbers go to the arrays of LanesInTurn at the
   table's addresses. The caller holds a reference to `env` and `action`, which the environment's
   code might drop. */
static int step_lane(const Lanes *the, int64_t lane, PyObject *env, PyObject *action, int reset)
{
    const int64_t *t = the->table.words;
    PyObject *readers = the->readers;
    double reward = 0;
    int terminated = 0, truncated = 0;
    if (reset) {
        if (reset_lane(the, lane, env, OF_STEP) < 0)
            return -1;
    } else {
        PyObject *parts = tuple_of(PyObject_CallMethodObjArgs(env, the->step, action, NULL), 5);
        if (parts == NULL)
            return -1;
        PyObject *obs = PyTuple_GetItem(parts, 0);
        Py_INCREF(obs);
        int failed = PyList_SetItem(the->seen, lane, obs) < 0 ||
            as_double(PyTuple_GetItem(parts, 1), readers, &reward) < 0 ||
            (terminated = as_flag(PyTuple_GetItem(parts, 2), readers, R_TERMINATED)) < 0 ||
            (truncated = as_flag(PyTuple_GetItem(parts, 3), readers, R_TRUNCATED)) < 0;
        const int last = t[L_MODE] == SAME_STEP && (terminated || truncated);
        if (!failed)
            failed = hand_on(the, lane, PyTuple_GetItem(parts, 4), last ? OF_LAST : OF_STEP) < 0;
        if (!failed && last)
            failed = finish_lane(the, lane, env, obs) < 0;
        Py_DECREF(parts);
        if (failed)
            return -1;
    }
    ((double *)at(t[L_REWARD]))[lane] = reward;
    at(t[L_TERMINATED])[lane] = (char)terminated;
    at(t[L_TRUNCATED])[lane] = (char)truncated;
    return 0;
}

/* Write rewards and flags of all lanes to a slot; return 0 if a reward is not written. */
static int put_numbers(const int64_t *slot, const int64_t *t)
{
    const double *rewards = (const double *)at(t[L_REWARD]);
    const int64_t lanes = t[L_LANES];
    for (int64_t lane = 0; lane < lanes; lane++)
        if (!put_reward(at(slot[S_REWARD]), slot[S_DOUBLES] != 0, lane, rewards[lane]))
            return 0;
    memcpy(at(slot[S_TERMINATED]), at(t[L_TERMINATED]), (size_t)lanes);
    memcpy(at(slot[S_TRUNCATED]), at(t[L_TRUNCATED]), (size_t)lanes);
    return 1;
}

/* step_lanes(table, dtype, readers, envs, action, seen, ended, to, slot). LanesInTurn owns every
   argument but the caller's `action`, `to` and `slot`; the buffers of `ended` and `to` are held until
   the end. A `slot` is a table as of put_step, of one observation, whose row is `to`. */
static PyObject *step_lanes(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Lanes the;
    Table slot = {.count = 0};
    Py_buffer ended, rows;
    PyObject *actions = NULL, *result = NULL;
    int put = 0, has_rows = 0;
    if (want(given, 9) < 0 || open_table(args[0], &the.table, L_SHAPE) < 0)
        return NULL;
    PyObject *envs = args[3];
    the.dtype = args[1];
    the.readers = args[2];
    the.seen = args[5];
    the.step = the.name = NULL;
    const int64_t *t = the.table.words, lanes = t[L_LANES];
    *(int64_t *)at(t[L_LANE]) = -1;
    if (PyObject_GetBuffer(args[6], &ended, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&the.table.buffer);
        return NULL;
    }
    if (!PyTuple_Check(the.readers) || PyTuple_Size(the.readers) <= R_ENTRIES ||
        !PyList_Check(envs) || PyList_Size(envs) != lanes || !PyList_Check(the.seen) ||
        PyObject_Size(args[4]) != lanes || ended.len != lanes) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "lanes, actions and observations differ in number");
        goto done;
    }
    /* If `to` is not contiguous, or None, the caller copies the observations. */
    has_rows = args[7] != Py_None && PyObject_GetBuffer(args[7], &rows, PyBUF_CONTIG) == 0;
    if (!has_rows)
        PyErr_Clear();
    put = has_rows && rows.len == lanes * t[L_NBYTES];
    if (args[8] != Py_None && open_table(args[8], &slot, SLOT_WORDS + O_SHAPE) < 0)
        goto done;
    the.step = PyUnicode_InternFromString("step");
    the.name = PyUnicode_InternFromString("dtype");
    actions = PyObject_GetIter(args[4]);
    if (the.step == NULL || the.name == NULL || actions == NULL)
        goto done;
    char *flags = (char *)ended.buf;
    for (int64_t lane = 0; lane < lanes; lane++) {
        *(int64_t *)at(t[L_LANE]) = lane;
        if (flags[lane] && t[L_MODE] == DISABLED) {
            PyErr_Format(PyExc_AssertionError, "lane %lld is stepped on after its episode ended",
                         (long long)lane);
            goto done;
        }
        PyObject *env = PyList_GetItem(envs, lane);
        if (env == NULL)
            goto done;
        Py_INCREF(env);
        PyObject *action = PyIter_Next(actions);
        int failed = action == NULL;
        if (!failed)
            failed = step_lane(&the, lane, env, action, flags[lane] && t[L_MODE] == NEXT_STEP);
        else if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "there are fewer actions than lanes");
        Py_DECREF(env);
        Py_XDECREF(action);
        if (failed)
            goto done;
    }
    /* After the last step: observations of several lanes may be views of one array. */
    for (int64_t lane = 0; put && lane < lanes; lane++) {
        PyObject *obs = PyList_GetItem(the.seen, lane);
        if (obs == NULL)
            goto done;
        Py_INCREF(obs);
        char *to = (char *)rows.buf + lane * t[L_NBYTES];
        put = put_row(to, obs, the.name, the.dtype, &the.table, L_NBYTES);
        Py_DECREF(obs);
        if (PyErr_Occurred())
            goto done;
    }
    int64_t ends = 0;
    for (int64_t lane = 0; lane < lanes; lane++)
        ends += flags[lane] = at(t[L_TERMINATED])[lane] || at(t[L_TRUNCATED])[lane];
    if (put && slot.count) {
        const int64_t *words = slot.words + SLOT_WORDS;
        put = slot.words[S_LANES] == lanes && put_numbers(slot.words, t);
        if (put && words[O_ROOT])
            memcpy(at(words[O_ROOT]), rows.buf, (size_t)rows.len);
    }
    result = PyLong_FromLongLong(put ? ends : -1);
done:
    if (slot.count)
        PyBuffer_Release(&slot.buffer);
    Py_XDECREF(actions);
    Py_XDECREF(the.name);
    Py_XDECREF(the.step);
    if (has_rows)
        PyBuffer_Release(&rows);
    PyBuffer_Release(&ended);
    PyBuffer_Release(&the.table.buffer);
    return result;
}

#include "_sum_tree.c"
#include "_lane_blocks.c"

static PyMethodDef functions[] = {
    {"copy_rows", (PyCFunction)(void (*)(void))copy_rows, METH_FASTCALL, NULL},
    {"commit_rows", (PyCFunction)(void (*)(void))commit_rows, METH_FASTCALL, NULL},
    {"gather_rows", (PyCFunction)(void (*)(void))gather_rows, METH_FASTCALL, NULL},
    {"pack_runs", (PyCFunction)(void (*)(void))pack_runs, METH_FASTCALL, NULL},
    {"number_slots", (PyCFunction)(void (*)(void))number_slots, METH_FASTCALL, NULL},
    {"are_inside", (PyCFunction)(void (*)(void))are_inside, METH_FASTCALL, NULL},
    {"store_slots", (PyCFunction)(void (*)(void))store_slots, METH_FASTCALL, NULL},
    {"put_step", (PyCFunction)(void (*)(void))put_step, METH_FASTCALL, NULL},
    {"put_entry", (PyCFunction)(void (*)(void))put_entry, METH_FASTCALL, NULL},
    {"step_lanes", (PyCFunction)(void (*)(void))step_lanes, METH_FASTCALL, NULL},
    {"same_rows", (PyCFunction)(void (*)(void))same_rows, METH_FASTCALL, NULL},
    {"nth_marked", (PyCFunction)(void (*)(void))nth_marked, METH_FASTCALL, NULL},
    {"put_leaves", (PyCFunction)(void (*)(void))put_leaves, METH_FASTCALL, NULL},
    {"renew_sums", (PyCFunction)(void (*)(void))renew_sums, METH_FASTCALL, NULL},
    {"draw_rows", (PyCFunction)(void (*)(void))draw_rows, METH_FASTCALL, NULL},
    {"put_priorities", (PyCFunction)(void (*)(void))put_priorities, METH_FASTCALL, NULL},
    {"set_leaves", (PyCFunction)(void (*)(void))set_leaves, METH_FASTCALL, NULL},
    {"spots_of", (PyCFunction)(void (*)(void))spots_of, METH_FASTCALL, NULL},
    {"windows_of", (PyCFunction)(void (*)(void))windows_of, METH_FASTCALL, NULL},
    {"rows_at", (PyCFunction)(void (*)(void))rows_at, METH_FASTCALL, NULL},
    {"bounds_of", (PyCFunction)(void (*)(void))bounds_of, METH_FASTCALL, NULL},
    {"walk_onward", (PyCFunction)(void (*)(void))walk_onward, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

/* Export the names of the words, in their order. */
static int name_words(PyObject *module)
{
    if (PyModule_AddStringConstant(module, "NUMBERING", NUMBERING(NAME)) < 0 ||
        PyModule_AddStringConstant(module, "EPISODE", EPISODE(NAME)) < 0 ||
        PyModule_AddStringConstant(module, "COMMIT", COMMIT(NAME)) < 0 ||
        PyModule_AddStringConstant(module, "SHELVES", SHELVES(NAME)) < 0 ||
        PyModule_AddStringConstant(module, "RUN", RUN(NAME)) < 0 ||
        PyModule_AddStringConstant(module, "HELD", HELD(NAME)) < 0 ||
        PyModule_AddStringConstant(module, "LOG", LOG(NAME)) < 0 ||
        PyModule_AddStringConstant(module, "BLOCKS", BLOCK(NAME)) < 0 ||
        PyModule_AddStringConstant(module, "SLAB", SLAB(NAME)) < 0 ||
        PyModule_AddStringConstant(module, "TREE", TREE(NAME)) < 0)
        return -1;
    return PyModule_AddStringConstant(module, "LEDGER", LEDGER(NAME));
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)name_words}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernel", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&module);
}
