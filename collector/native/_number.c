/* Numbering of the rows of a slab. `_kernel.c` includes this file. `SlabTable` implements the same
   in NumPy. */

/* The numbering table: sizes, flags and addresses. CompiledSlabTable creates it and keeps it alive.
   CompiledSlabTable also holds the columns up to `lane`, and owns the outputs `begun`, `episodes` and
   `largest`. LaneState owns the arrays named `state_*`. */
#define NUMBERING(WORD)                                                                            \
    WORD(lanes) WORD(stride) WORD(terminated) WORD(truncated) WORD(done) WORD(next_valid)          \
    WORD(makes_done) WORD(makes_truncated) WORD(reward) WORD(reward_is_double) WORD(rewards)       \
    WORD(version) WORD(traj_ids) WORD(step) WORD(lane) WORD(state_id) WORD(state_step)             \
    WORD(state_return) WORD(state_version) WORD(state_length) WORD(begun) WORD(episodes)           \
    WORD(largest)
typedef struct { NUMBERING(MEMBER) } Numbering;
enum { NUMBERING_WORDS = sizeof(Numbering) / sizeof(int64_t) };

/* The fields of a record of the episode log, packed without padding. */
#define EPISODE(WORD)                                                                              \
    WORD(traj_id) WORD(lane) WORD(return) WORD(length) WORD(terminated) WORD(first_version)        \
    WORD(last_version) WORD(ended_at)
enum { EPISODE_LANE = 8, EPISODE_ENDED_AT = 45, EPISODE_NBYTES = 53 };

/* Write the record of an episode that ended. `nth` is the number, from 1, of its last row among
   the rows that this call numbers. */
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

/* Return the sum of the rewards of row `i`. The table has the number of rewards per row. */
static double reward_of(const Numbering *t, int64_t i)
{
    const int64_t size = t->reward_is_double ? sizeof(double) : sizeof(float);
    const char *rewards = span(t->reward, i * t->rewards * size, t->rewards * size);
    const float *narrow = (const float *)rewards;
    const double *wide = (const double *)rewards;
    double sum = t->reward_is_double ? *wide : (double)*narrow;
    for (int64_t nth = 1; nth < t->rewards; nth++)
        sum += t->reward_is_double ? wide[nth] : (double)narrow[nth];
    return sum;
}

/* Number the rows of the first slots. `taken` marks the cells that are rows. If it is NULL, all
   cells are rows. Return begun << 32 | ended, the numbers of episodes that began and that ended.
   The function writes to the slab's columns, to the arrays of LaneState, and to the outputs of
   CompiledSlabTable. */
static int64_t number(const Numbering *t, int64_t slots, const char *taken)
{
    const int64_t lanes = t->lanes, cells = slots * lanes;
    const char *terminated = span(t->terminated, 0, cells);
    char *truncated = span(t->truncated, 0, cells), *done = span(t->done, 0, cells);
    char *valid = t->next_valid ? span(t->next_valid, 0, cells) : NULL;
    const int64_t *version = (const int64_t *)span(t->version, 0, cells * 8);
    int64_t *ids = (int64_t *)span(t->traj_ids, 0, cells * 8);
    int64_t *steps = (int64_t *)span(t->step, 0, cells * 8);
    int64_t *id = (int64_t *)span(t->state_id, 0, lanes * 8);
    int64_t *step = (int64_t *)span(t->state_step, 0, lanes * 8);
    double *total = (double *)span(t->state_return, 0, lanes * 8);
    int64_t *first = (int64_t *)span(t->state_version, 0, lanes * 8);
    int64_t *length = (int64_t *)span(t->state_length, 0, lanes * 8);
    int64_t *begun = (int64_t *)span(t->begun, 0, cells * 8);
    const int32_t *number = (const int32_t *)span(t->lane, 0, cells * 4);
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
                tell(span(t->episodes, EPISODE_NBYTES * ends, EPISODE_NBYTES), id[lane], number[i],
                     total[lane], length[lane], terminated[i], first[lane], version[i], rows);
                ends++;
                id[lane] += t->stride;
                step[lane] = length[lane] = 0;
                total[lane] = 0.0;
            }
        }
    }
    *(int64_t *)span(t->largest, 0, 8) = largest;
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
    close_table(&table);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(found);
}
