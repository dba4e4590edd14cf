/* Functions that step environments and write the results to a slab. `_kernel.c` includes this
   file. */

/* Return 1 if a buffer has this format, in the notation of the struct module, and these
   dimensions. */
static int is_like(const Py_buffer *view, const char *format, int64_t ndim, const int64_t *shape)
{
    if (view->ndim != ndim || view->format == NULL || strcmp(view->format, format) != 0)
        return 0;
    for (int64_t i = 0; i < ndim; i++)
        if (view->shape[i] != shape[i])
            return 0;
    return 1;
}

/* Write a reward as element `i` of the rewards of a slot at `to`. Return 0, without writing, if
   conversion to float32 makes it infinite, 0 or another integer. The caller then raises or warns
   in Python. */
static int put_reward(char *to, int as_doubles, int64_t i, double reward)
{
    const float narrow = (float)reward;
    if (as_doubles) {
        ((double *)(void *)to)[i] = reward;
        return 1;
    }
    if (fabs(reward) > 16777216.0) { /* float32 represents every integer up to this one */
        if (isfinite(reward) && (!isfinite(narrow) || (narrow != reward && floor(reward) == reward)))
            return 0;
    } else if (narrow == 0 && reward != 0) {
        return 0;
    }
    ((float *)(void *)to)[i] = narrow;
    return 1;
}

/* Copy rewards to the slab at `to`. Return 0 if they are not floats, one per lane, or if
   `put_reward` rejects one. */
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

/* The table of a slot. It has the addresses of rewards, terminated and truncated, a flag that is
   set if rewards are doubles, and the number of lanes. For each observation it also has the
   address of its row, the address of the copy that the policy sees next (0 if that is the same
   memory), the number of dimensions, and the shape. The slab owns the memory at these
   addresses. */
#define SLOT(WORD) WORD(reward) WORD(terminated) WORD(truncated) WORD(reward_is_double) WORD(lanes)
#define OBSERVATION(WORD) WORD(row) WORD(root) WORD(ndim)
typedef struct { SLOT(MEMBER) } SlotWords;
typedef struct { OBSERVATION(MEMBER) int64_t shape[]; } ObservationWords;
enum {
    SLOT_WORDS = sizeof(SlotWords) / sizeof(int64_t),
    OBSERVATION_WORDS = sizeof(ObservationWords) / sizeof(int64_t)
};
#define STEP_BUFFER (PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)

/* Flags of all lanes. The slab owns the arrays. */
typedef struct {
    const char *terminated, *truncated;
    int64_t lanes;
} Flags;

static int has_ended(const Flags *of, int64_t lane)
{
    return of->terminated[lane] || of->truncated[lane];
}

/* Write one observation to its row, and to the copy that the policy sees next. With `ended`, write
   only the final observations of the lanes that ended, and only to the row. Return 0 if the
   observation does not match its words, or after an error. */
static int put_observation(const ObservationWords *words, PyObject *format, PyObject *seen,
                           const Flags *ended)
{
    Py_buffer view;
    const char *wanted = PyBytes_AsString(format);
    if (wanted == NULL || PyObject_GetBuffer(seen, &view, STEP_BUFFER) < 0)
        return 0;
    const int fits = is_like(&view, wanted, words->ndim, words->shape);
    char *row = span(words->row, 0, fits ? view.len : 0);
    if (fits && ended) {
        const int64_t size = view.len / ended->lanes;
        for (int64_t lane = 0; lane < ended->lanes; lane++)
            if (has_ended(ended, lane))
                memmove(row + lane * size, (char *)view.buf + lane * size, (size_t)size);
    } else if (fits) {
        memmove(row, view.buf, (size_t)view.len);
        if (words->root)
            memcpy(span(words->root, 0, view.len), row, (size_t)view.len);
    }
    PyBuffer_Release(&view);
    return fits;
}

/* Write all observations of a step, one per format. With `ended`, write the final observations of
   the lanes that ended. */
static int put_observations(const Table *table, PyObject *formats, PyObject *observations,
                            const Flags *ended)
{
    const int64_t *next = table->words + SLOT_WORDS, *end = table->words + table->count;
    const Py_ssize_t count = PyTuple_Size(formats);
    if (count < 0 || PySequence_Size(observations) != count)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const ObservationWords *words = (const ObservationWords *)next;
        if (end - next < OBSERVATION_WORDS || end - words->shape < words->ndim) {
            PyErr_SetString(PyExc_ValueError, "a table is too short");
            return 0;
        }
        if (ended && !words->root) /* the row is also the first observation of the next episode */
            return 0;
        PyObject *seen = PySequence_GetItem(observations, i);
        const int put = seen && put_observation(words, PyTuple_GetItem(formats, i), seen, ended);
        Py_XDECREF(seen);
        if (!put)
            return 0;
        next = words->shape + words->ndim;
    }
    return 1;
}

/* Clear the error that an object without a suitable buffer raised, because the caller reads such
   an object with NumPy. Return -1 after any other error. */
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

/* put_step(table, formats, observations, reward, terminated, truncated, final): write the arrays
   of a step to a slot. Return the number of lanes that ended, or -1 if an array does not match the
   table or `put_reward` rejects a reward. The function holds the buffer of each array while it
   reads the array. */
static PyObject *put_step(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Py_buffer views[3];
    int opened = 0;
    int64_t ended = -1;
    if (want(given, 7) < 0 || open_table(args[0], &table, SLOT_WORDS) < 0)
        return NULL;
    const SlotWords *t = (const SlotWords *)table.words;
    const int64_t *lanes = &t->lanes;
    for (; opened < 3; opened++)
        if (PyObject_GetBuffer(args[3 + opened], &views[opened], STEP_BUFFER) < 0)
            goto done;
    const Py_buffer *over = &views[1], *cut = &views[2];
    if (is_like(over, "?", 1, lanes) && is_like(cut, "?", 1, lanes)
        && put_rewards(span(t->reward, 0, *lanes * (t->reward_is_double ? 8 : 4)),
                       t->reward_is_double != 0, &views[0], lanes)
        && put_observations(&table, args[1], args[2], NULL)) {
        const Flags flags = {span(t->terminated, 0, *lanes), span(t->truncated, 0, *lanes), *lanes};
        memmove(span(t->terminated, 0, *lanes), over->buf, (size_t)*lanes);
        memmove(span(t->truncated, 0, *lanes), cut->buf, (size_t)*lanes);
        int64_t ends = 0;
        for (int64_t lane = 0; lane < *lanes; lane++)
            ends += has_ended(&flags, lane);
        if (!ends || args[6] == Py_None || put_observations(&table, args[1], args[6], &flags))
            ended = ends;
    }
done:
    while (opened)
        PyBuffer_Release(&views[--opened]);
    close_table(&table);
    return cleared() < 0 ? NULL : PyLong_FromLongLong(ended);
}

/* Return 1 if a lane is marked. A NULL buffer marks all lanes. */
static int is_marked(const Py_buffer *marks, int64_t lane)
{
    return marks->buf == NULL || ((const char *)marks->buf)[lane];
}

enum { I_ROW, I_VALUES, I_GIVEN, I_HAVE, I_LANES, I_BUFFERS };

/* Write an entry of infos to its column, for the lanes that I_LANES marks. `fill` is the row of a
   lane without the entry. Return 0 if the arrays do not match, or if a lane lacks a required
   entry. */
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

/* put_entry(row, given, fill, found, lanes). The function holds the buffers until it returns. */
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

/* The table of lanes, which SequentialStep keeps alive. The shape of an observation follows. */
#define LANES(WORD)                                                                                \
    WORD(reward) WORD(terminated) WORD(truncated) WORD(lane) WORD(finals) WORD(lanes) WORD(mode)   \
    WORD(nbytes)
typedef struct { LANES(MEMBER) } LaneWords;
enum { LANE_WORDS = sizeof(LaneWords) / sizeof(int64_t) };

/* The autoreset modes, which define when a lane is reset after the end of its episode. */
#define MODES(WORD) WORD(disabled) WORD(next_step) WORD(same_step)
#define MODE(name) MODE_##name,
enum { MODES(MODE) };

/* Return the values of an environment as a tuple of `wanted` items. The caller owns the tuple. The
   function steals the reference to `returned`. */
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

#define READERS(WORD)                                                                              \
    WORD(bool) WORD(float32) WORD(reward) WORD(terminated) WORD(truncated) WORD(final)             \
    WORD(overwritten) WORD(tell) WORD(entries)
#define READER(name) R_##name,
enum { READERS(READER) };

/* The call that returned an info. */
#define CALLS(WORD) WORD(step) WORD(last) WORD(reset)
#define CALL(name) OF_##name,
enum { CALLS(CALL) };

/* Return 1 if an object has the NumPy type at index `kind` of the readers. The extension reads
   such an object directly. SequentialStep keeps the tuple of readers alive. */
static int is_of(PyObject *object, PyObject *readers, Py_ssize_t kind)
{
    return (PyObject *)Py_TYPE(object) == PyTuple_GetItem(readers, kind);
}

/* Read a reward. Read floats in the range of float32 and integers up to 2**24 directly, and call
   the reader's function for anything else. Return 0, or -1 after an error. */
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
        if (!beyond && whole >= -16777216 && whole <= 16777216) /* exact in float32 */
            return whole == -1 && PyErr_Occurred() ? -1 : 0;
    } else if (is_of(object, readers, R_float32)) {
        made = PyNumber_Float(object);
    }
    if (made == NULL && !PyErr_Occurred())
        made = PyObject_CallFunctionObjArgs(PyTuple_GetItem(readers, R_reward), object, NULL);
    if (made == NULL)
        return -1;
    *number = PyFloat_AsDouble(made);
    Py_DECREF(made);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Read a flag. Read bools directly, and call the reader's function for anything else. Return -1
   after an error. */
static int as_flag(PyObject *object, PyObject *readers, Py_ssize_t reader)
{
    if (object == Py_True || object == Py_False)
        return object == Py_True;
    if (is_of(object, readers, R_bool))
        return PyObject_IsTrue(object);
    PyObject *made = PyObject_CallFunctionObjArgs(PyTuple_GetItem(readers, reader), object, NULL);
    const int flag = made == NULL ? -1 : PyObject_IsTrue(made);
    Py_XDECREF(made);
    return flag;
}

/* Copy an object to the row `to` of one of our arrays. Return 0 if the object is not an array of
   this dtype and shape. The shape is at the end of the table, after `words` words, the last of
   which is the size of a row in bytes. The function clears the errors of the object's buffer, and
   the caller then copies the object with NumPy. */
static int put_row(char *to, PyObject *seen, PyObject *name, PyObject *dtype, const Table *table,
                   Py_ssize_t words)
{
    const int64_t *shape = table->words + words;
    const Py_ssize_t ndim = table->count - words;
    Py_buffer view;
    PyObject *found = PyObject_GetAttr(seen, name);
    int same = found == dtype;
    Py_XDECREF(found);
    if (same && PyObject_GetBuffer(seen, &view, PyBUF_C_CONTIGUOUS) == 0) {
        same = view.ndim == ndim && view.len == shape[-1];
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

/* Return 1 if two objects have contiguous buffers that do not overlap. Return 0 for all other
   objects, even if they share no memory. */
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

/* The arguments of a step of all lanes. `step` and `name` are strings that step_lanes owns.
   SequentialStep and the caller of step_lanes own the other objects. */
typedef struct {
    Table table;
    PyObject *dtype, *readers, *seen, *step, *name;
} Lanes;

/* An entry of infos is a tuple of its path, its dtype and a table. The table has the address of
   its column, and the address of the column that marks the lanes with the entry (0 if the entry is
   required). LaneResults keeps both columns alive. */
#define ENTRY(WORD) WORD(path) WORD(dtype) WORD(table)
#define OF_ENTRY(name) E_##name,
enum { ENTRY(OF_ENTRY) E_PARTS };

/* The table of an entry. The shape of a row follows. */
#define VALUE(WORD) WORD(column) WORD(given) WORD(kind) WORD(nbytes)
typedef struct { VALUE(MEMBER) } ValueWords;
enum { VALUE_WORDS = sizeof(ValueWords) / sizeof(int64_t) };

/* The kinds of values. An `empty` value is an empty dictionary, which has no column. */
#define VALUES(WORD) WORD(other) WORD(float64) WORD(int64) WORD(empty)
#define VALUE_KIND(name) VALUE_##name,
enum { VALUES(VALUE_KIND) };

/* Write a value to the column of an entry. Return 0 if Python code must write or check the
   value. */
static int write_entry(const Table *table, int64_t lane, PyObject *value, PyObject *name,
                       PyObject *dtype)
{
    const ValueWords *t = (const ValueWords *)table->words;
    char *to = span(t->column, lane * t->nbytes, t->nbytes);
    int beyond = 0;
    if (t->kind == VALUE_float64 && PyFloat_CheckExact(value)) {
        *(double *)to = PyFloat_AsDouble(value);
    } else if (t->kind == VALUE_int64 && PyLong_CheckExact(value)) {
        const long long whole = PyLong_AsLongLongAndOverflow(value, &beyond);
        if (beyond)
            return 0;
        *(int64_t *)to = whole;
    } else if (t->kind == VALUE_empty) {
        return PyDict_CheckExact(value) && PyDict_Size(value) == 0;
    } else if (!put_row(to, value, name, dtype, table, VALUE_WORDS)) {
        return 0;
    }
    if (t->given)
        *span(t->given, lane, 1) = 1;
    return 1;
}

/* Write an entry of an info, or skip an optional entry that the info lacks. Return 0 if Python
   code must write the value, if a required entry is missing, or after an error. */
static int take_entry(const Lanes *the, int64_t lane, PyObject *info, PyObject *entry)
{
    Table table;
    if (!PyTuple_Check(entry) || PyTuple_Size(entry) != E_PARTS)
        return 0;
    PyObject *path = PyTuple_GetItem(entry, E_path);
    for (Py_ssize_t i = 0; info != NULL && i < PyTuple_Size(path); i++) {
        if (!PyDict_CheckExact(info))
            return 0;
        info = PyDict_GetItemWithError(info, PyTuple_GetItem(path, i));
    }
    if (PyErr_Occurred() || open_table(PyTuple_GetItem(entry, E_table), &table, VALUE_WORDS) < 0)
        return 0;
    int taken = info == NULL && ((const ValueWords *)table.words)->given;
    if (info != NULL) {
        Py_INCREF(info);
        taken = write_entry(&table, lane, info, the->name, PyTuple_GetItem(entry, E_dtype));
        Py_DECREF(info);
    }
    close_table(&table);
    return taken;
}

/* Write the entries of an info that are columns. This function writes them if the call is OF_step
   and all entries are plain. Otherwise the reader's function writes all of them. Return 0, or -1
   after an error. */
static int hand_on(const Lanes *the, int64_t lane, PyObject *info, int of)
{
    PyObject *entries = PyTuple_GetItem(the->readers, R_entries);
    const Py_ssize_t count = PyTuple_Size(entries);
    int taken = count <= 0 || of == OF_step;
    for (Py_ssize_t i = 0; taken && i < count; i++)
        taken = take_entry(the, lane, info, PyTuple_GetItem(entries, i));
    if (taken || PyErr_Occurred())
        return taken && !PyErr_Occurred() ? 0 : -1;
    PyObject *made = PyObject_CallFunction(PyTuple_GetItem(the->readers, R_tell), "LOi",
                                           (long long)lane, info, of);
    Py_XDECREF(made);
    return made == NULL ? -1 : 0;
}

/* Reset a lane, and store its observation in the list `seen`, which owns it. Return 0, or -1 after
   an error. */
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
   `last`, because the reset may drop the environment's own reference. The reader's function raises
   if the reset overwrote `last`. Return 0, or -1 after an error. */
static int finish_lane(const Lanes *the, int64_t lane, PyObject *env, PyObject *last)
{
    const LaneWords *t = (const LaneWords *)the->table.words;
    char *to = t->finals ? span(t->finals, lane * t->nbytes, t->nbytes) : NULL;
    PyObject *made = NULL;
    if (to == NULL || !put_row(to, last, the->name, the->dtype, &the->table, LANE_WORDS)) {
        if (PyErr_Occurred())
            return -1;
        made = PyObject_CallFunction(PyTuple_GetItem(the->readers, R_final), "LO", (long long)lane,
                                     last);
        if (made == NULL)
            return -1;
        Py_DECREF(made);
    }
    if (reset_lane(the, lane, env, OF_reset) < 0)
        return -1;
    PyObject *first = PyList_GetItem(the->seen, lane);
    if (first == NULL)
        return -1;
    Py_INCREF(first);
    int failed = 0;
    if (!are_apart(last, first)) {
        failed = PyErr_Occurred() != NULL;
        if (!failed) {
            made = PyObject_CallFunction(PyTuple_GetItem(the->readers, R_overwritten), "LOO",
                                         (long long)lane, last, first);
            failed = made == NULL;
            Py_XDECREF(made);
        }
    }
    Py_DECREF(first);
    return failed ? -1 : 0;
}

/* Step one lane, or reset it if `reset` is set. Return 0, or -1 after an error. The list `seen` of
   SequentialStep then owns the observation. The function writes the reward and the flags to the
   arrays of SequentialStep at the table's addresses. The caller holds references to `env` and
   `action`, because the environment's code may drop its own references. */
static int step_lane(const Lanes *the, int64_t lane, PyObject *env, PyObject *action, int reset)
{
    const LaneWords *t = (const LaneWords *)the->table.words;
    PyObject *readers = the->readers;
    double reward = 0;
    int terminated = 0, truncated = 0;
    if (reset) {
        if (reset_lane(the, lane, env, OF_step) < 0)
            return -1;
    } else {
        PyObject *parts = tuple_of(PyObject_CallMethodObjArgs(env, the->step, action, NULL), 5);
        if (parts == NULL)
            return -1;
        PyObject *obs = PyTuple_GetItem(parts, 0);
        Py_INCREF(obs);
        int failed = PyList_SetItem(the->seen, lane, obs) < 0 ||
            as_double(PyTuple_GetItem(parts, 1), readers, &reward) < 0 ||
            (terminated = as_flag(PyTuple_GetItem(parts, 2), readers, R_terminated)) < 0 ||
            (truncated = as_flag(PyTuple_GetItem(parts, 3), readers, R_truncated)) < 0;
        const int last = t->mode == MODE_same_step && (terminated || truncated);
        if (!failed)
            failed = hand_on(the, lane, PyTuple_GetItem(parts, 4), last ? OF_last : OF_step) < 0;
        if (!failed && last)
            failed = finish_lane(the, lane, env, obs) < 0;
        Py_DECREF(parts);
        if (failed)
            return -1;
    }
    *(double *)span(t->reward, lane * 8, 8) = reward;
    *span(t->terminated, lane, 1) = (char)terminated;
    *span(t->truncated, lane, 1) = (char)truncated;
    return 0;
}

/* Write the rewards and flags of all lanes to a slot. Return 0 if `put_reward` rejects a
   reward. */
static int put_numbers(const SlotWords *slot, const LaneWords *t)
{
    const int64_t lanes = t->lanes;
    const double *rewards = (const double *)span(t->reward, 0, lanes * 8);
    char *to = span(slot->reward, 0, lanes * (slot->reward_is_double ? 8 : 4));
    for (int64_t lane = 0; lane < lanes; lane++)
        if (!put_reward(to, slot->reward_is_double != 0, lane, rewards[lane]))
            return 0;
    memcpy(span(slot->terminated, 0, lanes), span(t->terminated, 0, lanes), (size_t)lanes);
    memcpy(span(slot->truncated, 0, lanes), span(t->truncated, 0, lanes), (size_t)lanes);
    return 1;
}

/* step_lanes(table, dtype, readers, envs, action, seen, ended, to, slot). SequentialStep owns all
   arguments except `action`, `to` and `slot`, which the caller owns. The function holds the
   buffers of `ended` and `to` until it returns. `slot` is a table like that of put_step, with one
   observation, whose row is `to`. */
static PyObject *step_lanes(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Lanes the;
    Table slot = {.count = 0};
    Py_buffer ended, rows;
    PyObject *actions = NULL, *result = NULL;
    int put = 0, has_rows = 0;
    if (want(given, 9) < 0 || open_table(args[0], &the.table, LANE_WORDS) < 0)
        return NULL;
    PyObject *envs = args[3];
    the.dtype = args[1];
    the.readers = args[2];
    the.seen = args[5];
    the.step = the.name = NULL;
    const LaneWords *t = (const LaneWords *)the.table.words;
    const int64_t lanes = t->lanes;
    *(int64_t *)span(t->lane, 0, 8) = -1;
    if (PyObject_GetBuffer(args[6], &ended, PyBUF_WRITABLE) < 0) {
        close_table(&the.table);
        return NULL;
    }
    if (!PyTuple_Check(the.readers) || PyTuple_Size(the.readers) <= R_entries ||
        !PyList_Check(envs) || PyList_Size(envs) != lanes || !PyList_Check(the.seen) ||
        PyObject_Size(args[4]) != lanes || ended.len != lanes) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "lanes, actions and observations differ in number");
        goto done;
    }
    /* If `to` is None or not contiguous, the caller copies the observations. */
    has_rows = args[7] != Py_None && PyObject_GetBuffer(args[7], &rows, PyBUF_CONTIG) == 0;
    if (!has_rows)
        PyErr_Clear();
    put = has_rows && rows.len == lanes * t->nbytes;
    if (args[8] != Py_None && open_table(args[8], &slot, SLOT_WORDS + OBSERVATION_WORDS) < 0)
        goto done;
    the.step = PyUnicode_InternFromString("step");
    the.name = PyUnicode_InternFromString("dtype");
    actions = PyObject_GetIter(args[4]);
    if (the.step == NULL || the.name == NULL || actions == NULL)
        goto done;
    char *flags = (char *)ended.buf;
    for (int64_t lane = 0; lane < lanes; lane++) {
        *(int64_t *)span(t->lane, 0, 8) = lane;
        if (flags[lane] && t->mode == MODE_disabled) {
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
            failed = step_lane(&the, lane, env, action, flags[lane] && t->mode == MODE_next_step);
        else if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "there are fewer actions than lanes");
        Py_DECREF(env);
        Py_XDECREF(action);
        if (failed)
            goto done;
    }
    /* Copy the observations only after the last step, because those of several lanes may be views
       of one array. */
    for (int64_t lane = 0; put && lane < lanes; lane++) {
        PyObject *obs = PyList_GetItem(the.seen, lane);
        if (obs == NULL)
            goto done;
        Py_INCREF(obs);
        char *to = (char *)rows.buf + lane * t->nbytes;
        put = put_row(to, obs, the.name, the.dtype, &the.table, LANE_WORDS);
        Py_DECREF(obs);
        if (PyErr_Occurred())
            goto done;
    }
    int64_t ends = 0;
    for (int64_t lane = 0; lane < lanes; lane++)
        ends += flags[lane] = *span(t->terminated, lane, 1) || *span(t->truncated, lane, 1);
    if (put && slot.count) {
        const SlotWords *words = (const SlotWords *)slot.words;
        const ObservationWords *observation = (const ObservationWords *)(slot.words + SLOT_WORDS);
        put = words->lanes == lanes && put_numbers(words, t);
        if (put && observation->root)
            memcpy(span(observation->root, 0, rows.len), rows.buf, (size_t)rows.len);
    }
    result = PyLong_FromLongLong(put ? ends : -1);
done:
    if (slot.count)
        close_table(&slot);
    Py_XDECREF(actions);
    Py_XDECREF(the.name);
    Py_XDECREF(the.step);
    if (has_rows)
        PyBuffer_Release(&rows);
    PyBuffer_Release(&ended);
    close_table(&the.table);
    return result;
}
