/* What small steps of environments spend most of their time on, in one call each.

   Optional: `kernel.py` says what stands in its place, and what each function means. Arguments are
   tables of numbers, int64 in native order: addresses, sizes and counts of arrays that somebody in
   Python keeps alive and within bounds. Nothing here knows of NumPy or torch. Python's stable ABI. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    Py_buffer buffer;
    const int64_t *words;
    Py_ssize_t count;
} Table;

/* A buffer of whole int64 words, at least `least` of them. */
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

/* Rows of `size` bytes from source[index[i]] to target[i]. */
static void gather(char *target, const char *source, int64_t size, const int64_t *index,
                   Py_ssize_t count)
{
#define ROWS(bytes)                                                                                \
    for (Py_ssize_t i = 0; i < count; i++)                                                         \
        memcpy(target + i * (bytes), source + index[i] * (bytes), (size_t)(bytes));                \
    break
    switch (size) { /* a size that the compiler knows is one move */
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

/* While much is copied other threads run: of little, to let them would take as long. */
static PyThreadState *let_others_run(const Table *table, int64_t count)
{
    int64_t row = 0;
    for (Py_ssize_t i = ROW_NBYTES; i < table->count; i += COLUMN_WORDS)
        row += table->words[i];
    return row * count > (1 << 16) ? PyEval_SaveThread() : NULL;
}

/* A run of rows of every column. */
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

/* One word that others may read at any time: what was stored before is there when they see it. */
static void publish(char *where, uint64_t word)
{
    __atomic_store_n((uint64_t *)where, word, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

enum { RESERVE_WORD, HEAD_WORD, RECORD_SLOT, HEADER_WORDS };

/* commit_rows(table, slot, first, count, header, word, seal, record): copy_rows between the two
   words of a commit, `reserve` and `head`, which are the same `word`; before `head` the record,
   whose sequence, the first word of its seal, comes last. Native order, as the tables. */
static PyObject *commit_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table, header, seal;
    Py_buffer record;
    if (want(given, 8) < 0)
        return NULL;
    int64_t slot = PyLong_AsLongLong(args[1]);
    int64_t first = PyLong_AsLongLong(args[2]);
    int64_t count = PyLong_AsLongLong(args[3]);
    uint64_t word = PyLong_AsUnsignedLongLong(args[5]), sequence;
    if (PyErr_Occurred() || open_table(args[0], &table, COLUMN_WORDS) < 0)
        return NULL;
    if (open_table(args[4], &header, HEADER_WORDS) < 0)
        goto header_failed;
    if (open_table(args[6], &seal, 1) < 0)
        goto seal_failed;
    if (PyObject_GetBuffer(args[7], &record, PyBUF_SIMPLE) < 0)
        goto record_failed;
    char *to = at(header.words[RECORD_SLOT]);
    Py_ssize_t sealed = seal.buffer.len;
    publish(at(header.words[RESERVE_WORD]), word);
    copy_columns(&table, slot, first, count);
    memcpy(to + sealed, record.buf, (size_t)record.len);
    memcpy(to + sizeof sequence, (char *)seal.buffer.buf + sizeof sequence,
           (size_t)sealed - sizeof sequence);
    memcpy(&sequence, seal.buffer.buf, sizeof sequence);
    publish(to, sequence);
    publish(at(header.words[HEAD_WORD]), word);
    PyBuffer_Release(&record);
    PyBuffer_Release(&seal.buffer);
    PyBuffer_Release(&header.buffer);
    PyBuffer_Release(&table.buffer);
    Py_RETURN_NONE;
record_failed:
    PyBuffer_Release(&seal.buffer);
seal_failed:
    PyBuffer_Release(&header.buffer);
header_failed:
    PyBuffer_Release(&table.buffer);
    return NULL;
}

/* gather_rows(table, slot, index, rows): rows of every column, one behind the other from a slot on;
   an IndexError, and nothing done, where one is not below `rows`. */
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

enum {
    LANES, STRIDE, TERMINATED, TRUNCATED, DONE, NEXT_VALID, MAKES_DONE, MAKES_TRUNCATED,
    REWARD, REWARD_IS_DOUBLE, VERSION, TRAJ_IDS, STEP, LANE,
    STATE_ID, STATE_STEP, STATE_RETURN, STATE_VERSION, STATE_LENGTH,
    BEGUN, EPISODES, LARGEST, NUMBER_WORDS
};

#define EPISODE_NBYTES 45

/* An episode that ended, as the log has it. */
static void tell(char *to, int64_t id, int32_t lane, double total, int64_t length, char terminated,
                 int64_t first, int64_t last)
{
    memcpy(to, &id, 8);
    memcpy(to + 8, &lane, 4);
    memcpy(to + 12, &total, 8);
    memcpy(to + 20, &length, 8);
    to[28] = terminated;
    memcpy(to + 29, &first, 8);
    memcpy(to + 37, &last, 8);
}

/* number_slots(table, slots, taken): number the rows of some slots; begun << 32 | ended. */
static PyObject *number_slots(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Py_buffer mask;
    const char *taken = NULL;
    if (want(given, 3) < 0)
        return NULL;
    int64_t slots = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() || open_table(args[0], &table, NUMBER_WORDS) < 0)
        return NULL;
    const int64_t *t = table.words, lanes = t[LANES];
    if (args[2] != Py_None) {
        if (PyObject_GetBuffer(args[2], &mask, PyBUF_SIMPLE) < 0) {
            PyBuffer_Release(&table.buffer);
            return NULL;
        }
        taken = (const char *)mask.buf;
        if (mask.len < slots * lanes) {
            PyBuffer_Release(&mask);
            PyBuffer_Release(&table.buffer);
            PyErr_SetString(PyExc_ValueError, "a mask is too short");
            return NULL;
        }
    }
    const char *terminated = at(t[TERMINATED]);
    char *truncated = at(t[TRUNCATED]), *done = at(t[DONE]);
    char *valid = t[NEXT_VALID] ? at(t[NEXT_VALID]) : NULL;
    const float *narrow = (const float *)at(t[REWARD]);
    const double *wide = (const double *)at(t[REWARD]);
    const int64_t *version = (const int64_t *)at(t[VERSION]);
    int64_t *ids = (int64_t *)at(t[TRAJ_IDS]), *steps = (int64_t *)at(t[STEP]);
    int64_t *id = (int64_t *)at(t[STATE_ID]), *step = (int64_t *)at(t[STATE_STEP]);
    double *total = (double *)at(t[STATE_RETURN]);
    int64_t *first = (int64_t *)at(t[STATE_VERSION]), *length = (int64_t *)at(t[STATE_LENGTH]);
    int64_t *begun = (int64_t *)at(t[BEGUN]);
    const int32_t *number = (const int32_t *)at(t[LANE]);
    int64_t begins = 0, ends = 0, i = 0, largest = -1;

    for (int64_t slot = 0; slot < slots; slot++) {
        for (int64_t lane = 0; lane < lanes; lane++, i++) {
            if (t[MAKES_TRUNCATED])
                truncated[i] = done[i] && !terminated[i];
            if (t[MAKES_DONE])
                done[i] = terminated[i] || truncated[i];
            if (valid)
                valid[i] = !done[i];
            ids[i] = id[lane];
            steps[i] = step[lane];
            if (taken && !taken[i])
                continue;
            if (!length[lane]) {
                first[lane] = version[i];
                begun[begins++] = i;
            }
            if (!step[lane] && id[lane] > largest)
                largest = id[lane];
            step[lane]++;
            length[lane]++;
            total[lane] += t[REWARD_IS_DOUBLE] ? wide[i] : (double)narrow[i];
            if (done[i]) {
                tell(at(t[EPISODES]) + EPISODE_NBYTES * ends++, id[lane], number[i], total[lane],
                     length[lane], terminated[i], first[lane], version[i]);
                id[lane] += t[STRIDE];
                step[lane] = length[lane] = 0;
                total[lane] = 0.0;
            }
        }
    }
    *(int64_t *)at(t[LARGEST]) = largest;
    if (taken)
        PyBuffer_Release(&mask);
    PyBuffer_Release(&table.buffer);
    return PyLong_FromLongLong(begins << 32 | ends);
}

enum { VALUES, KIND, SLOT_COUNT, LOW, HIGH, CHECK_WORDS };
enum { F32, F64, I8, U8, I16, U16, I32, U32, I64, U64 };

/* are_inside(table, slots): every value of the first slots of every column is within its bounds. */
static PyObject *are_inside(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    int outside = 0;
    if (want(given, 2) < 0)
        return NULL;
    int64_t slots = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() || open_table(args[0], &table, 0) < 0)
        return NULL;
    const int64_t *check = table.words, *end = check + table.count;
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
        default: outside = 1; /* whoever takes the longer way finds out */
        }
#undef LOOK
    }
    PyBuffer_Release(&table.buffer);
    return PyBool_FromLong(!outside);
}

/* nth_marked(marks, uniform, chosen): in each row of marks, one byte each, the index of one that is
   marked, or of any where none is, by a double in [0, 1); int64. */
static PyObject *nth_marked(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer marks, uniform, chosen;
    if (want(given, 3) < 0 || PyObject_GetBuffer(args[0], &marks, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[1], &uniform, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&marks);
        return NULL;
    }
    if (PyObject_GetBuffer(args[2], &chosen, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&uniform);
        PyBuffer_Release(&marks);
        return NULL;
    }
    const int64_t rows = chosen.len / (Py_ssize_t)sizeof(int64_t);
    const int64_t choices = rows ? marks.len / rows : 0;
    const int fit = choices * rows == marks.len && (Py_ssize_t)(rows * sizeof(double)) == uniform.len;
    const uint8_t *row = (const uint8_t *)marks.buf;
    for (int64_t i = 0; fit && i < rows; i++, row += choices) {
        int64_t count = 0, index = 0;
        for (int64_t k = 0; k < choices; k++)
            count += row[k] != 0;
        const int any = count == 0;
        if (any)
            count = choices;
        int64_t left = (int64_t)(((const double *)uniform.buf)[i] * (double)count);
        if (left > count - 1) /* rounding may make the product as large as the count itself */
            left = count - 1;
        for (; index < choices - 1; index++)
            if ((any || row[index]) && left-- == 0)
                break;
        ((int64_t *)chosen.buf)[i] = index;
    }
    PyBuffer_Release(&chosen);
    PyBuffer_Release(&uniform);
    PyBuffer_Release(&marks);
    if (!fit) {
        PyErr_SetString(PyExc_ValueError, "marks, numbers and choices differ in their rows");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"copy_rows", (PyCFunction)(void (*)(void))copy_rows, METH_FASTCALL, NULL},
    {"commit_rows", (PyCFunction)(void (*)(void))commit_rows, METH_FASTCALL, NULL},
    {"gather_rows", (PyCFunction)(void (*)(void))gather_rows, METH_FASTCALL, NULL},
    {"number_slots", (PyCFunction)(void (*)(void))number_slots, METH_FASTCALL, NULL},
    {"are_inside", (PyCFunction)(void (*)(void))are_inside, METH_FASTCALL, NULL},
    {"nth_marked", (PyCFunction)(void (*)(void))nth_marked, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernel", NULL, 0, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&module);
}
