/* Compiled functions that copy and commit rows, draw from sum trees and update them, search the
   index of rows by trajectory, and place and read frames.

   The extension is optional. `kernel.py` documents the functions, and
   `storage/trajectories/blocks/extension.py` those of the index. Without the extension, Python
   code does the same work. `_rows.h` defines tables and the rules of ownership.

     table of                the table is kept        the arrays at its addresses are kept
                             alive by                 alive by
     copy_rows, commit_rows  Columns._tables          targets: Columns.arrays, maps of the files;
                                                      sources: FixedRows.arrays, the slab's columns
     gather_rows, appends    Columns._tables          the same
     gather_rows, reads      ColumnMemory.table       targets: ColumnMemory.arrays;
                                                      sources: Columns.arrays
     pack_runs               LeafMemory._table        LeafMemory: its room, and the columns' arrays
     the header              Header.addresses         Header._map, the map of its file
     set_leaves, renew_sums  SumTree._table           SumTree: its leaves, and the levels above them
     put_leaves, draw_rows   the same                 the same
     put_priorities          the same                 the same; powers: Powers._table; numbers in a
                                                      tuple: the caller's tensors
     spots_of, rows_at, ...  LaneBlocks._table        LaneBlocks: its arrays, shelves and tail
     walk_onward, bounds_of  the same                 the same
     place_frames            FrameWriter._table       FrameWriter: its arrays, and the map of the pool;
                                                      values: the caller of FrameWriter.append
     read_frames             FrameLayout.table        has no addresses */

#include "_rows.h"

/* Copy rows of `size` bytes from source[index[i]] to target[i]. The rows are scattered in memory.
   The loop therefore prefetches later rows while it copies one, far enough ahead that each arrives
   in time. The owners of the caller's table and buffer keep target, source and index alive. */
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
    switch (size) { /* if the size is constant, the compiler copies a row in one move */
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
    close_table(&table);
    Py_RETURN_NONE;
}

/* commit_rows(table, slot, first, count, header, known, record). `known` is the address of a
   COMMIT block. The function holds the three buffers until it returns. */
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
        commit(&table, slot, first, count, NULL, (const Header *)header.words, (Commit *)at(known),
               (const char *)record.buf, (size_t)record.len);
    PyBuffer_Release(&record);
    close_table(&header);
    close_table(&table);
    return PyBool_FromLong(can);
record_failed:
    close_table(&header);
header_failed:
    close_table(&table);
    return NULL;
}

/* gather_rows(table, slot, index, rows): copy rows of every column to slots from `slot` on. Raise
   IndexError, without copying anything, if an index is not below `rows`. The caller owns the array
   of indices. The function holds its buffer until it returns. */
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
        close_table(&table);
        return NULL;
    }
    int beyond = 0;
    for (Py_ssize_t i = 0; i < index.count; i++)
        beyond |= (uint64_t)index.words[i] >= (uint64_t)rows;
    if (beyond) {
        close_table(&index);
        close_table(&table);
        PyErr_SetString(PyExc_IndexError, "a row is not there");
        return NULL;
    }
    PyThreadState *others = let_others_run(&table, index.count);
    for (const Column *column = first_column(&table); column < end_of_columns(&table); column++)
        gather(span(column->target, slot * column->row_nbytes, index.count * column->row_nbytes),
               span(column->source, 0, rows * column->row_nbytes), column->row_nbytes, index.words,
               index.count);
    if (others)
        PyEval_RestoreThread(others);
    close_table(&index);
    close_table(&table);
    Py_RETURN_NONE;
}

/* A run of adjacent rows. */
typedef struct {
    int64_t slot, count;
} Stretch;

/* Copy runs one after the other. Return the end of the copied bytes. */
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

/* Return the number of rows in the runs. Return -1 if a run is empty or not within the first
   `rows` rows, or if there are more than `most` rows. */
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
   part, and column by column within each part. Raise IndexError, without copying anything, if runs
   or parts are out of bounds. The caller owns the arrays of runs and parts. The function holds
   their buffers until it returns. */
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
        const Column *column = first_column(&table), *end = end_of_columns(&table);
        int64_t row = 0;
        for (; column < end; column++)
            row += column->row_nbytes;
        column = first_column(&table);
        char *target = span(column->target, 0, count * row);
        for (Py_ssize_t i = 0; i < parts.count; run += parts.words[i++])
            for (column = first_column(&table); column < end; column++)
                target = copy_runs(target, span(column->source, 0, rows * column->row_nbytes),
                                   column->row_nbytes, run, run + parts.words[i]);
        if (others)
            PyEval_RestoreThread(others);
    }
    close_table(&parts);
    close_table(&runs);
    close_table(&table);
    if (inside)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_IndexError, "a row is not there");
    return NULL;
parts_failed:
    close_table(&runs);
runs_failed:
    close_table(&table);
    return NULL;
}

/* same_rows(one, other, same, skip): write to `same`, one byte per row, whether the rows of two
   arrays have the same bytes. The comparison ignores the first `skip` bytes of each row of `one`,
   and the last `skip` bytes of each row of `other`. The caller owns the arrays. The function holds
   their buffers until it returns. */
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

/* sum_steps(chain, ends, others, rewards, powers, count, last, sums, ring): see `Kernel`. The
   caller owns the arrays. The function holds their buffers until it returns. */
static PyObject *sum_steps(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer buffers[8];
    if (want(given, 9) < 0)
        return NULL;
    const int64_t ring = PyLong_AsLongLong(args[8]);
    if (PyErr_Occurred() || open_buffers(args, buffers, 8) < 0)
        return NULL;
    const int64_t *chain = (const int64_t *)buffers[0].buf;
    const char *ends = (const char *)buffers[1].buf, *others = (const char *)buffers[2].buf;
    const char *rewards = (const char *)buffers[3].buf;
    const double *powers = (const double *)buffers[4].buf;
    int64_t *count = (int64_t *)buffers[5].buf, *last = (int64_t *)buffers[6].buf;
    double *sums = (double *)buffers[7].buf;
    const int64_t n = buffers[4].len / 8, rows = buffers[5].len / 8, size = buffers[3].itemsize;
    const int64_t slots = buffers[1].len;
    int inside = n > 0 && (size == 4 || size == 8) && ring >= 0 && buffers[0].len == n * rows * 8 &&
                 buffers[6].len == rows * 8 && buffers[7].len == rows * 8 &&
                 buffers[2].len == slots && buffers[3].len / size == slots;
    for (int64_t i = 0; inside && i < rows; i++) {
        double sum = 0;
        int64_t k = 0;
        for (;; k++) {
            const int64_t row = chain[k * rows + i], slot = ring ? row % ring : row;
            if (slot < 0 || slot >= slots) {
                inside = 0;
                break;
            }
            const double reward =
                size == 4 ? *(const float *)(rewards + slot * 4) : *(const double *)(rewards + slot * 8);
            sum = k ? sum + reward * powers[k] : reward * powers[k];
            last[i] = row;
            if (k + 1 == n)
                break;
            if (ends[slot] || others[slot] || chain[(k + 1) * rows + i] == row) {
                sum += 0.0; /* as NumPy adds unused rewards */
                break;
            }
        }
        count[i] = k + 1;
        sums[i] = sum;
    }
    release_buffers(buffers, 8);
    if (inside)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_IndexError, "a row is not there");
    return NULL;
}

/* Open the values of a column, `nbytes` bytes: a buffer, the address of a tensor's values, or None,
   for which the buffer is NULL. The caller must release the buffer unless this returns -1. */
static int open_values(PyObject *object, Py_buffer *buffer, Py_ssize_t nbytes)
{
    memset(buffer, 0, sizeof *buffer);
    if (object == Py_None)
        return 0;
    if (PyLong_Check(object)) {
        buffer->buf = PyLong_AsVoidPtr(object);
        return buffer->buf ? 0 : -1;
    }
    if (PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE) < 0)
        return -1;
    if (buffer->len == nbytes)
        return 0;
    PyBuffer_Release(buffer);
    PyErr_SetString(PyExc_ValueError, "a column has another number of values");
    return -1;
}

enum { TAIL_ARRAYS = 8, TAIL_NUMBERS = 2, WINDOW_WORDS = 64, WINDOW_IDS = 64 * WINDOW_WORDS };

/* The trajectory ids in use: all ids below `base`, and id `base + i` if bit i of `used` is set. No id
   is larger than `largest`, which is below `base + WINDOW_IDS`. */
typedef struct {
    int64_t base, largest;
    uint64_t used[WINDOW_WORDS];
} IdWindow;

/* The arrays of `tails`, [lanes] each, and what follows them; see `IdKernel`. */
typedef struct {
    int64_t *id, *next, *run, *pending_id, *pending_next, *pending_run, *batch, *touched, lanes;
    int64_t *number, *count;
    IdWindow *window, *pending_window;
} Tails;

static int open_tails(PyObject *object, Py_buffer *buffer, Tails *tails)
{
    const Py_ssize_t after = 8 * TAIL_NUMBERS + 2 * (Py_ssize_t)sizeof(IdWindow);
    if (PyObject_GetBuffer(object, buffer, PyBUF_WRITABLE) < 0)
        return -1;
    tails->lanes = (buffer->len - after) / (8 * TAIL_ARRAYS);
    if (buffer->len < after || buffer->len != after + 8 * TAIL_ARRAYS * tails->lanes) {
        PyBuffer_Release(buffer);
        PyErr_SetString(PyExc_ValueError, "the tails have another size");
        return -1;
    }
    int64_t **arrays[] = {&tails->id, &tails->next, &tails->run, &tails->pending_id,
                          &tails->pending_next, &tails->pending_run, &tails->batch, &tails->touched,
                          &tails->number};
    for (int i = 0; i <= TAIL_ARRAYS; i++)
        *arrays[i] = (int64_t *)buffer->buf + i * tails->lanes;
    tails->count = tails->number + 1;
    tails->window = (IdWindow *)(tails->number + TAIL_NUMBERS);
    tails->pending_window = tails->window + 1;
    return 0;
}

/* Mark `id` as used. Return 0 if it may be in use already. */
static int take_id(IdWindow *window, int64_t id)
{
    if (id < window->base)
        return 0;
    uint64_t at = (uint64_t)id - (uint64_t)window->base;
    if (at >= WINDOW_IDS) { /* move the window; ids that fall out of it count as used */
        const uint64_t words = (at - WINDOW_IDS) / 64 + 1 + WINDOW_WORDS / 4;
        if (words < WINDOW_WORDS) {
            memmove(window->used, window->used + words, (WINDOW_WORDS - words) * 8);
            memset(window->used + WINDOW_WORDS - words, 0, words * 8);
            window->base += (int64_t)words * 64;
        } else { /* `largest` is far below */
            memset(window->used, 0, sizeof window->used);
            window->base = id - WINDOW_IDS / 2;
        }
        at = (uint64_t)id - (uint64_t)window->base;
    }
    const uint64_t bit = (uint64_t)1 << at % 64;
    if (window->used[at / 64] & bit)
        return 0;
    window->used[at / 64] |= bit;
    window->largest = id > window->largest ? id : window->largest;
    return 1;
}

/* admit_rows(ids, steps, lanes, ends, others, done, tails, count, lane_nbytes): see `IdKernel`. The
   caller owns the values, and keeps those at addresses alive. */
static PyObject *admit_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    enum { VALUES = 6 };
    (void)self;
    Py_buffer buffers[VALUES], room;
    Tails tails;
    if (want(given, 9) < 0)
        return NULL;
    const int64_t rows = PyLong_AsLongLong(args[7]), lane_nbytes = PyLong_AsLongLong(args[8]);
    const int64_t sizes[VALUES] = {8, 8, lane_nbytes, 1, 1, 1};
    int opened = 0, fits = 1;
    if (PyErr_Occurred())
        return NULL;
    while (opened < VALUES && open_values(args[opened], buffers + opened, rows * sizes[opened]) == 0)
        opened++;
    if (opened < VALUES || open_tails(args[6], &room, &tails) < 0) {
        release_buffers(buffers, opened);
        return NULL;
    }
    const int64_t *ids = buffers[0].buf, *steps = buffers[1].buf;
    const char *lanes = buffers[2].buf, *ends = buffers[3].buf, *others = buffers[4].buf;
    const char *done = buffers[5].buf;
    IdWindow *window = tails.pending_window;
    const int64_t number = ++*tails.number, largest = tails.window->largest;
    *window = *tails.window;
    *tails.count = 0;
    for (int64_t i = 0; fits && i < rows; i++) {
        const int64_t lane = lane_nbytes == 4 ? ((const int32_t *)lanes)[i]
                                              : ((const int64_t *)lanes)[i];
        const int64_t id = ids[i], step = steps[i];
        if (lane < 0 || lane >= tails.lanes) {
            fits = 0;
            break;
        }
        const int begun = tails.batch[lane] == number;
        const int64_t before = begun ? tails.pending_id[lane] : tails.id[lane];
        const int64_t next = begun ? tails.pending_next[lane] : tails.next[lane];
        if (before != id || next != step || id == INT64_MIN) {
            const int64_t last = begun ? tails.pending_run[lane] : tails.run[lane];
            fits = (id > last || (!begun && id > largest)) && take_id(window, id);
            if (!fits)
                break;
        }
        if (!begun) {
            tails.batch[lane] = number;
            tails.touched[(*tails.count)++] = lane;
        }
        const int over = ((ends && ends[i]) || (others && others[i])) && (!done || done[i]);
        tails.pending_id[lane] = over ? INT64_MIN : id;
        tails.pending_next[lane] = (int64_t)((uint64_t)step + 1);
        tails.pending_run[lane] = id;
    }
    const int64_t new_largest = window->largest;
    PyBuffer_Release(&room);
    release_buffers(buffers, VALUES);
    return fits ? PyLong_FromLongLong(new_largest) : Py_NewRef(Py_None);
}

/* use_ids(tails, ids): see `IdKernel`. */
static PyObject *use_ids(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer room, ids;
    Tails tails;
    if (want(given, 2) < 0 || PyObject_GetBuffer(args[1], &ids, PyBUF_SIMPLE) < 0)
        return NULL;
    if (open_tails(args[0], &room, &tails) < 0) {
        PyBuffer_Release(&ids);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < ids.len / 8; i++)
        take_id(tails.window, ((const int64_t *)ids.buf)[i]);
    PyBuffer_Release(&room);
    PyBuffer_Release(&ids);
    Py_RETURN_NONE;
}

/* settle_rows(tails): see `IdKernel`. */
static PyObject *settle_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer room;
    Tails tails;
    if (want(given, 1) < 0 || open_tails(args[0], &room, &tails) < 0)
        return NULL;
    for (int64_t i = 0; i < *tails.count && i < tails.lanes; i++) {
        const int64_t lane = tails.touched[i];
        tails.id[lane] = tails.pending_id[lane];
        tails.next[lane] = tails.pending_next[lane];
        tails.run[lane] = tails.pending_run[lane];
    }
    *tails.window = *tails.pending_window;
    PyBuffer_Release(&room);
    Py_RETURN_NONE;
}

#include "_sum_tree.c"
#include "_lane_blocks.c"
#include "_frame_pool.c"

static PyMethodDef functions[] = {
    {"copy_rows", (PyCFunction)(void (*)(void))copy_rows, METH_FASTCALL, NULL},
    {"commit_rows", (PyCFunction)(void (*)(void))commit_rows, METH_FASTCALL, NULL},
    {"gather_rows", (PyCFunction)(void (*)(void))gather_rows, METH_FASTCALL, NULL},
    {"pack_runs", (PyCFunction)(void (*)(void))pack_runs, METH_FASTCALL, NULL},
    {"same_rows", (PyCFunction)(void (*)(void))same_rows, METH_FASTCALL, NULL},
    {"sum_steps", (PyCFunction)(void (*)(void))sum_steps, METH_FASTCALL, NULL},
    {"admit_rows", (PyCFunction)(void (*)(void))admit_rows, METH_FASTCALL, NULL},
    {"use_ids", (PyCFunction)(void (*)(void))use_ids, METH_FASTCALL, NULL},
    {"settle_rows", (PyCFunction)(void (*)(void))settle_rows, METH_FASTCALL, NULL},
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
    {"place_frames", (PyCFunction)(void (*)(void))place_frames, METH_FASTCALL, NULL},
    {"mark_rows", (PyCFunction)(void (*)(void))mark_rows, METH_FASTCALL, NULL},
    {"read_frames", (PyCFunction)(void (*)(void))read_frames, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static const Names lists[] = {
    {"COLUMN", COLUMN(NAME)},     {"COMMIT", COMMIT(NAME)},   {"HEADER", HEADER(NAME)},
    {"TREE", TREE(NAME)},         {"LEVEL", LEVEL(NAME)},     {"NODES", NODES(NAMED)},
    {"POWERS", POWERS(NAMED)},    {"SHELVES", SHELVES(NAME)}, {"NUMBERS", NUMBERS(NAME)},
    {"LADDER", LADDER(NAMED)},    {"SHELF", SHELF(NAMED)},    {"INDEX", INDEX(NAMED)},
    {"FRAMES", FRAMES(NAME)},     {"WRITER", WRITER(NAME)},
};

static int export_lists(PyObject *module)
{
    return export_names(module, lists, sizeof lists / sizeof *lists);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)export_lists}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernel", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&module);
}
