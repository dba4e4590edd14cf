/* A sum tree, for draws in proportion to leaves. `_kernel.c` includes this file.

   `storage/ext/sampling/sum_tree.py` describes the tree, and implements the same in NumPy with
   bit-identical results. The children 0, 4, 8 and 12 of a node are a group, as are 1, 5, 9 and 13,
   and so on. The sum of a node adds the sums of its groups in order, in float64. The sum of a
   group adds its children. SumTree keeps the table, and the arrays at its addresses, alive. The
   caller owns the buffers of a call. */

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define FAN_OUT 16
#define GROUPS 4
#define AHEAD 8 /* prefetch distance in nodes */

/* The children of one node, if they are nodes themselves: the sum of each, its smallest leaf above
   0 (infinity if there is none), and its largest leaf. */
#define NODES(FIELD) FIELD(double, sum, FAN_OUT) FIELD(float, least, FAN_OUT) FIELD(float, most, FAN_OUT)
typedef struct { NODES(ARRAY) } Block;

/* The words of a table: the leaves, float32; their number, a multiple of FAN_OUT; and the number
   of levels above them. For each level, the address of its blocks and the number of its nodes
   follow. The last level has one node. */
#define TREE(WORD) WORD(leaves) WORD(slots) WORD(levels)
typedef struct { TREE(MEMBER) } Tree;
enum { TREE_WORDS = sizeof(Tree) / sizeof(int64_t) };
#define LEVEL(WORD) WORD(blocks) WORD(nodes)
typedef struct { LEVEL(MEMBER) } Level;
enum { LEVEL_WORDS = sizeof(Level) / sizeof(int64_t) };

static inline Block *blocks_of(const Table *table, int64_t level)
{
    const Level *of = (const Level *)(table->words + TREE_WORDS) + level;
    REQUIRE(level >= 0 && TREE_WORDS + (level + 1) * LEVEL_WORDS <= table->count);
    return (Block *)span(of->blocks, 0,
                         (of->nodes + FAN_OUT - 1) / FAN_OUT * (int64_t)sizeof(Block));
}

static inline int64_t nodes_of(const Table *table, int64_t level)
{
    return ((const Level *)(table->words + TREE_WORDS))[level].nodes;
}

static inline float *leaves_of(const Table *table)
{
    const Tree *tree = (const Tree *)table->words;
    return (float *)span(tree->leaves, 0, tree->slots * (int64_t)sizeof(float));
}

/* Open the table of a tree. The caller must close it. */
static int open_tree(PyObject *object, Table *table, Tree *tree)
{
    if (open_table(object, table, TREE_WORDS + LEVEL_WORDS) < 0)
        return -1;
    memcpy(tree, table->words, sizeof(Tree));
    if (tree->levels > 0 && table->count >= TREE_WORDS + tree->levels * LEVEL_WORDS)
        return 0;
    close_table(table);
    PyErr_SetString(PyExc_ValueError, "a table is too short");
    return -1;
}

/* Vectors of four or two numbers. GCC and Clang support these types on every processor. */
typedef float Four __attribute__((vector_size(16)));
typedef float Two __attribute__((vector_size(8)));
typedef double Pair __attribute__((vector_size(16)));

static inline Four four_of(const float *number)
{
    Four found;
    memcpy(&found, number, sizeof found);
    return found;
}

/* The sums of the four groups of 16 children. */
typedef struct { Pair first, last; } Groups;

static inline Pair nodes_at(const double *child)
{
    Pair found;
    memcpy(&found, child, sizeof found);
    return found;
}

static inline Pair leaves_at(const float *child)
{
#ifdef __SSE2__ /* compilers convert the numbers one by one in the generic branch */
    return _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)child)));
#else
    Two found;
    memcpy(&found, child, sizeof found);
    return __builtin_convertvector(found, Pair);
#endif
}

#define SUM_GROUPS(child, at, groups)                                                              \
    Groups groups = {at(child), at((child) + 2)};                                                  \
    for (int i = GROUPS; i < FAN_OUT; i += GROUPS) {                                               \
        groups.first += at((child) + i);                                                           \
        groups.last += at((child) + i + 2);                                                        \
    }

static inline double sum_of(Groups groups)
{
    return ((groups.first[0] + groups.first[1]) + groups.last[0]) + groups.last[1];
}

static inline Four lower(Four one, Four other)
{
#ifdef __SSE2__
    return _mm_min_ps(one, other);
#else
    for (int i = 0; i < 4; i++)
        one[i] = one[i] < other[i] ? one[i] : other[i];
    return one;
#endif
}

static inline Four higher(Four one, Four other)
{
#ifdef __SSE2__
    return _mm_max_ps(one, other);
#else
    for (int i = 0; i < 4; i++)
        one[i] = one[i] > other[i] ? one[i] : other[i];
    return one;
#endif
}

/* Return leaves with infinity in place of 0. */
static inline Four above_0(Four leaf)
{
    typedef int32_t Bits __attribute__((vector_size(16)));
    const Bits empty = {0x7f800000, 0x7f800000, 0x7f800000, 0x7f800000};
    return (Four)((Bits)leaf | ((leaf == 0) & empty));
}

/* Write a node, given the sums of its groups. Each of the four numbers in `least` and in `most`
   covers a quarter of its children. */
static inline void write_node(Block *blocks, int64_t node, Groups groups, Four least, Four most)
{
    Block *block = blocks + node / FAN_OUT;
    least = lower(least, (Four){least[2], least[3], least[2], least[3]});
    most = higher(most, (Four){most[2], most[3], most[2], most[3]});
    block->sum[node % FAN_OUT] = sum_of(groups);
    block->least[node % FAN_OUT] = least[0] < least[1] ? least[0] : least[1];
    block->most[node % FAN_OUT] = most[0] > most[1] ? most[0] : most[1];
}

/* Recompute a node of the lowest level from its leaves. */
static inline void renew_lowest(Block *blocks, int64_t node, const float *leaf)
{
    leaf += node * FAN_OUT;
    SUM_GROUPS(leaf, leaves_at, groups);
    Four most = four_of(leaf), least = above_0(most);
    for (int i = 4; i < FAN_OUT; i += 4) {
        least = lower(above_0(four_of(leaf + i)), least);
        most = higher(four_of(leaf + i), most);
    }
    write_node(blocks, node, groups, least, most);
}

/* Recompute a node of a higher level from its child nodes. */
static inline void renew_higher(Block *blocks, int64_t node, const Block *child)
{
    child += node;
    SUM_GROUPS(child->sum, nodes_at, groups);
    Four least = four_of(child->least), most = four_of(child->most);
    for (int i = 4; i < FAN_OUT; i += 4) {
        least = lower(four_of(child->least + i), least);
        most = higher(four_of(child->most + i), most);
    }
    write_node(blocks, node, groups, least, most);
}

static inline void renew(const Table *table, int64_t level, int64_t node)
{
    REQUIRE(node >= 0 && node < nodes_of(table, level));
    if (level == 0)
        renew_lowest(blocks_of(table, 0), node, leaves_of(table));
    else
        renew_higher(blocks_of(table, level), node, blocks_of(table, level - 1));
}

/* Prefetch the children of a node. */
static inline void fetch_below(const Table *table, int64_t level, int64_t node)
{
    REQUIRE(node >= 0 && node < nodes_of(table, level));
    if (level == 0)
        FETCH(leaves_of(table) + node * FAN_OUT);
    else
        fetch((const char *)(blocks_of(table, level - 1) + node), sizeof(Block));
}

/* Prefetch the block that contains the sum of a node. */
static inline void fetch_above(const Table *table, int64_t level, int64_t node)
{
    fetch((const char *)(blocks_of(table, level) + node / FAN_OUT), sizeof(Block));
}

/* Recompute the nodes [first, last] of `level`, and all nodes above them. */
static void renew_range(const Table *table, const Tree *tree, int64_t level, int64_t first,
                        int64_t last)
{
    for (; level < tree->levels; level++) {
        for (int64_t node = first; node <= last; node++)
            renew(table, level, node);
        first /= FAN_OUT;
        last /= FAN_OUT;
    }
}

/* A tree and the arrays of a call, which have `count` numbers each. `close_arrays` releases
   them. */
enum { MOST_ARRAYS = 3 };
typedef struct {
    Table table;
    Tree tree;
    Py_buffer buffers[MOST_ARRAYS];
    int opened;
    Py_ssize_t count;
} Arrays;

static void close_arrays(Arrays *arrays)
{
    while (arrays->opened)
        PyBuffer_Release(&arrays->buffers[--arrays->opened]);
    close_table(&arrays->table);
}

/* Open the tree in the first argument, and arrays in the next `given` arguments. `sizes` has the
   item size of each array. Return 0, or -1 after an error, with nothing open. */
static int open_arrays(PyObject *const *args, Arrays *arrays, const Py_ssize_t *sizes, int given)
{
    arrays->opened = 0;
    arrays->count = 0;
    if (open_tree(args[0], &arrays->table, &arrays->tree) < 0)
        return -1;
    for (int i = 0; i < given; i++) {
        Py_buffer *buffer = &arrays->buffers[i];
        if (PyObject_GetBuffer(args[1 + i], buffer, PyBUF_CONTIG) < 0)
            goto wrong;
        arrays->opened++;
        if (i == 0)
            arrays->count = buffer->len / sizes[0];
        if (buffer->len != arrays->count * sizes[i]) {
            PyErr_SetString(PyExc_ValueError, "arrays differ in length");
            goto wrong;
        }
    }
    return 0;
wrong:
    close_arrays(arrays);
    return -1;
}

/* A bitmap of the nodes that changed, for levels at which these nodes span at most MARKS nodes. */
enum { WORD_BITS = 64, MARKS = 4096 };

static inline void mark_node(uint64_t *marks, int64_t node)
{
    marks[node / WORD_BITS] |= (uint64_t)1 << node % WORD_BITS;
}

/* Recompute the marked nodes, and replace their marks by the marks of their parents. Mark 0 is the
   node `first`. */
static void renew_marked(const Table *table, int64_t level, uint64_t *marks, int64_t first,
                         int64_t last)
{
    for (int64_t word = 0; word <= (last - first) / WORD_BITS; word++) {
        uint64_t left = marks[word];
        marks[word] = 0;
        for (; left; left &= left - 1) {
            const int64_t node = first + word * WORD_BITS + __builtin_ctzll(left);
            renew(table, level, node);
            mark_node(marks, node / FAN_OUT - first / FAN_OUT);
        }
    }
}

/* Set the leaves of slots, and recompute the nodes above them. The function overwrites `slot`.

   At a level at which the slots span many nodes, a node is recomputed once per sequence of equal
   entries of `slot`. At the other levels, each node is recomputed once. */
static void put(const Table *table, const Tree *tree, int64_t *slot, const float *number,
                Py_ssize_t count)
{
    float *leaf = leaves_of(table);
    int64_t first = tree->slots, last = -1, level = 0;
    if (!count)
        return;
    for (Py_ssize_t i = 0; i < count; i++) {
        first = slot[i] < first ? slot[i] : first;
        last = slot[i] > last ? slot[i] : last;
        REQUIRE(slot[i] >= 0 && slot[i] < tree->slots);
        leaf[slot[i]] = number[i];
    }
    for (; level < tree->levels; level++) {
        first /= FAN_OUT;
        last /= FAN_OUT;
        if (last - first < MARKS || last - first < count)
            break;
        int64_t before = -1;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (i + AHEAD < count)
                fetch_above(table, level, slot[i + AHEAD] / FAN_OUT);
            slot[i] /= FAN_OUT;
            if (slot[i] != before)
                renew(table, level, slot[i]);
            before = slot[i];
        }
    }
    if (last - first < count) { /* most nodes in the range have probably changed */
        renew_range(table, tree, level, first, last);
        return;
    }
    uint64_t marks[MARKS / WORD_BITS + 1] = {0};
    for (Py_ssize_t i = 0; i < count; i++)
        mark_node(marks, slot[i] / FAN_OUT - first);
    for (; level < tree->levels; level++) {
        renew_marked(table, level, marks, first, last);
        first /= FAN_OUT;
        last /= FAN_OUT;
    }
}

/* Read integers from the arguments. Return 0, or -1 after an error. */
static int whole_numbers(PyObject *const *args, int64_t *numbers, int count)
{
    for (int i = 0; i < count; i++)
        numbers[i] = PyLong_AsLongLong(args[i]);
    return PyErr_Occurred() ? -1 : 0;
}

/* The slots of rows. With a ring, row r is in slot r % ring. Without one, it is in slot r - base.
   The rows [first, stop) have leaves. `most` is one more than the largest row that ever
   existed. */
enum { N_RING, N_BASE, N_FIRST, N_STOP, N_MOST, NUMBERING_WORDS_OF_ROWS };

static inline int fits_tree(const Tree *tree, const int64_t *where)
{
    const int64_t ring = where[N_RING], base = where[N_BASE], first = where[N_FIRST];
    return ring ? ring > 0 && ring <= tree->slots && first >= 0
                : first >= base && where[N_STOP] - base <= tree->slots;
}

/* Return the slot of a row, or -1 if the row has no leaf. Prefetch the memory that a change of the
   leaf needs. */
static inline int64_t fetch_slot(const Table *table, const int64_t *where, int64_t row)
{
    if (row < where[N_FIRST] || row >= where[N_STOP])
        return -1;
    const int64_t slot = where[N_RING] ? row % where[N_RING] : row - where[N_BASE];
    FETCH(leaves_of(table) + slot);
    fetch_above(table, 0, slot / FAN_OUT);
    return slot;
}

/* Set the leaves of those slots whose present leaf is above 0. Return the number of the other
   slots. The function overwrites `slot` and `number`. */
static Py_ssize_t put_above_0(const Table *table, const Tree *tree, int64_t *slot, float *number,
                              Py_ssize_t count)
{
    const float *leaf = leaves_of(table);
    Py_ssize_t left = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (slot[i] >= 0 && leaf[slot[i]] > 0) {
            REQUIRE(slot[i] < tree->slots);
            slot[left] = slot[i];
            number[left++] = number[i];
        }
    put(table, tree, slot, number, left);
    return count - left;
}

/* put_leaves(table, rows, leaves, ring, base, first, stop, most). The function overwrites both
   arrays. */
static PyObject *put_leaves(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    static const Py_ssize_t sizes[] = {sizeof(int64_t), sizeof(float)};
    (void)self;
    Arrays open;
    PyObject *result = NULL;
    int64_t where[NUMBERING_WORDS_OF_ROWS];
    if (want(given, 3 + NUMBERING_WORDS_OF_ROWS) < 0 ||
        whole_numbers(args + 3, where, NUMBERING_WORDS_OF_ROWS) < 0 ||
        open_arrays(args, &open, sizes, 2) < 0)
        return NULL;
    int64_t *row = open.buffers[0].buf;
    int right = fits_tree(&open.tree, where);
    for (Py_ssize_t i = 0; i < open.count; i++)
        right &= row[i] >= 0 && row[i] < where[N_MOST];
    if (right) {
        for (Py_ssize_t i = 0; i < open.count; i++)
            row[i] = fetch_slot(&open.table, where, row[i]);
        result = PyLong_FromSsize_t(
            put_above_0(&open.table, &open.tree, row, open.buffers[1].buf, open.count));
    } else
        PyErr_SetString(PyExc_IndexError, "a row is not in the tree");
    close_arrays(&open);
    return result;
}

/* set_leaves(table, slots, leaf). The function overwrites the slots. */
static PyObject *set_leaves(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    static const Py_ssize_t sizes[] = {sizeof(int64_t), sizeof(float)};
    (void)self;
    Arrays open;
    PyObject *result = NULL;
    if (want(given, 3) < 0 || open_arrays(args, &open, sizes, 2) < 0)
        return NULL;
    int64_t *slot = open.buffers[0].buf;
    int right = 1;
    for (Py_ssize_t i = 0; i < open.count; i++)
        right &= slot[i] >= 0 && slot[i] < open.tree.slots;
    if (right) {
        put(&open.table, &open.tree, slot, open.buffers[1].buf, open.count);
        result = Py_NewRef(Py_None);
    } else
        PyErr_SetString(PyExc_IndexError, "a slot is not in the tree");
    close_arrays(&open);
    return result;
}

/* renew_sums(table, first, stop): recompute the sums above the slots [first, stop). */
static PyObject *renew_sums(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Tree tree;
    if (want(given, 3) < 0)
        return NULL;
    int64_t first = PyLong_AsLongLong(args[1]);
    int64_t stop = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || open_tree(args[0], &table, &tree) < 0)
        return NULL;
    if (first < 0 || stop > tree.slots) {
        close_table(&table);
        PyErr_SetString(PyExc_IndexError, "a slot is not in the tree");
        return NULL;
    }
    if (first < stop) { /* other threads may run: the caller holds the lock of the tree */
        PyThreadState *others = stop - first > (1 << 16) ? PyEval_SaveThread() : NULL;
        renew_range(&table, &tree, 0, first / FAN_OUT, (stop - 1) / FAN_OUT);
        if (others)
            PyEval_RestoreThread(others);
    }
    close_table(&table);
    Py_RETURN_NONE;
}

/* Return the largest double below `number`, which is positive. */
static inline double just_below(double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    bits--;
    memcpy(&number, &bits, sizeof bits);
    return number;
}

/* Return the index of the part, among four, that contains `mass`. Replace `mass` by its offset in
   that part, which is always below the part's end, regardless of rounding. */
static inline int part_of(const double *part, double *mass)
{
    double until[GROUPS + 1];
    int number = 0;
    until[0] = 0;
    for (int i = 0; i < GROUPS; i++)
        until[i + 1] = until[i] + part[i];
    for (int i = 1; i <= GROUPS; i++) /* branchless, because the outcome is unpredictable */
        number += until[i] <= *mass;
    const double left = *mass - until[number], end = just_below(part[number]);
    *mass = left < end ? left : end;
    return number;
}

/* Return the child of a node that contains `mass`, and update `mass` as `part_of` does. */
#define CHOOSE(child, at, mass)                                                                    \
    SUM_GROUPS(child, at, sums);                                                                   \
    const double group[GROUPS] = {sums.first[0], sums.first[1], sums.last[0], sums.last[1]};       \
    const int j = part_of(group, mass);                                                            \
    const double part[GROUPS] = {(child)[j], (child)[GROUPS + j], (child)[2 * GROUPS + j],         \
                                 (child)[3 * GROUPS + j]};                                         \
    return GROUPS * part_of(part, mass) + j

static inline int choose_node(const double *child, double *mass) { CHOOSE(child, nodes_at, mass); }
static inline int choose_leaf(const float *child, double *mass) { CHOOSE(child, leaves_at, mass); }

/* draw_rows(table, uniform, rows, leaves, ring, base, stop). The function overwrites the uniform
   numbers. With a ring, it returns the newest row below `stop` in each drawn slot. */
static PyObject *draw_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    static const Py_ssize_t sizes[] = {sizeof(double), sizeof(int64_t), sizeof(float)};
    (void)self;
    Arrays open;
    int64_t where[3];
    if (want(given, 7) < 0 || whole_numbers(args + 4, where, 3) < 0 ||
        open_arrays(args, &open, sizes, 3) < 0)
        return NULL;
    const Table *table = &open.table;
    const Tree *tree = &open.tree;
    const Py_ssize_t count = open.count;
    double *mass = open.buffers[0].buf;
    int64_t *node = open.buffers[1].buf;
    float *leaf = open.buffers[2].buf;
    const double total = blocks_of(table, tree->levels - 1)->sum[0];
    if (!(total > 0)) {
        PyErr_SetString(PyExc_ValueError,
                        "expected a tree with a leaf above 0, got only leaves of 0");
        close_arrays(&open);
        return NULL;
    }
    const double most = just_below(total);
    for (Py_ssize_t i = 0; i < count; i++) {
        const double part = mass[i] * total;
        mass[i] = part < most ? part : most;
        node[i] = 0;
    }
    /* Descend level by level, so that the loads of many nodes overlap. */
    for (int64_t level = tree->levels - 2; level >= 0; level--) {
        const Block *blocks = blocks_of(table, level);
        for (Py_ssize_t i = 0; i < count; i++) {
            node[i] = node[i] * FAN_OUT + choose_node(blocks[node[i]].sum, &mass[i]);
            fetch_below(table, level, node[i]);
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const float *child = leaves_of(table) + node[i] * FAN_OUT;
        const int number = choose_leaf(child, &mass[i]);
        leaf[i] = child[number];
        node[i] = node[i] * FAN_OUT + number;
    }
    const int64_t ring = where[0], base = where[1], last = where[2] - 1;
    for (Py_ssize_t i = 0; i < count; i++) /* leaves beyond the ring are 0 and never drawn */
        node[i] = ring > 0 ? last - ((last - node[i]) % ring + ring) % ring : node[i] + base;
    close_arrays(&open);
    Py_RETURN_NONE;
}

/* Powers with a fixed exponent, by table lookup. `storage/ext/sampling/powers.py` creates and
   describes the table, and reads it in the same way. */
enum { SERIES = 6, PARTS = 128, EXPONENTS = 2048, FRACTION_BITS = 52, PART_BITS = 45 };
#define POWERS(FIELD)                                                                              \
    FIELD(double, added, 1) FIELD(double, series, SERIES) FIELD(double, inverse, PARTS)            \
    FIELD(double, middle, PARTS) FIELD(double, whole, EXPONENTS)
typedef struct { POWERS(ARRAY) } Powers;

static inline double power_of(const Powers *powers, double number)
{
    uint64_t bits, part_bits;
    double fraction, centre;
    memcpy(&bits, &number, sizeof bits);
    const int part = (int)(bits >> PART_BITS) & (PARTS - 1);
    const double *whole = &powers->whole[bits >> FRACTION_BITS & (EXPONENTS - 1)];
    bits = (bits & (((uint64_t)1 << FRACTION_BITS) - 1)) | (uint64_t)0x3ff << FRACTION_BITS;
    part_bits = (bits >> PART_BITS << PART_BITS) | (uint64_t)1 << (PART_BITS - 1);
    memcpy(&fraction, &bits, sizeof fraction);
    memcpy(&centre, &part_bits, sizeof centre);
    const double off = (fraction - centre) * powers->inverse[part];
    double found = powers->series[SERIES - 1];
    for (int i = SERIES - 2; i >= 0; i--)
        found = found * off + powers->series[i];
    return found * powers->middle[part] * *whole;
}

/* An argument with numbers: an array with one stride, or a tuple of an address, a count and an
   item size. */
typedef struct {
    Py_buffer buffer;
    const char *first;
    Py_ssize_t count, stride, size;
    int opened;
} Given;

/* Open an array whose format, in the notation of the struct module, is in `formats`, or a tuple
   with any item size. Return 0, or 1 if the object is neither. The caller must close the numbers
   in both cases. */
static int open_given(PyObject *object, Given *numbers, const char *formats)
{
    Py_buffer *buffer = &numbers->buffer;
    numbers->opened = 0;
    if (PyTuple_Check(object)) {
        if (PyTuple_Size(object) != 3)
            return 1;
        numbers->first = PyLong_AsVoidPtr(PyTuple_GetItem(object, 0));
        numbers->count = PyLong_AsSsize_t(PyTuple_GetItem(object, 1));
        numbers->size = numbers->stride = PyLong_AsSsize_t(PyTuple_GetItem(object, 2));
    } else if (PyObject_GetBuffer(object, buffer, PyBUF_STRIDED_RO | PyBUF_FORMAT) == 0) {
        const char *format = buffer->format;
        numbers->opened = 1;
        numbers->first = buffer->buf;
        numbers->size = numbers->stride = buffer->itemsize;
        numbers->count = buffer->itemsize ? buffer->len / buffer->itemsize : 0;
        if (!format || !format[0] || format[1] || !strchr(formats, format[0]))
            return 1;
        if (!PyBuffer_IsContiguous(buffer, 'C')) {
            if (buffer->ndim != 1)
                return 1;
            numbers->stride = buffer->strides[0];
        }
    }
    if (!PyErr_Occurred())
        return 0;
    PyErr_Clear();
    return 1;
}

static void close_given(Given *numbers)
{
    if (numbers->opened)
        PyBuffer_Release(&numbers->buffer);
}

static inline int64_t whole_at(const Given *numbers, Py_ssize_t i)
{
    int64_t found;
    memcpy(&found, numbers->first + i * numbers->stride, sizeof found);
    return found;
}

static inline double real_at(const Given *numbers, Py_ssize_t i)
{
    double found;
    float single;
    if (numbers->size == sizeof found) {
        memcpy(&found, numbers->first + i * numbers->stride, sizeof found);
        return found;
    }
    memcpy(&single, numbers->first + i * numbers->stride, sizeof single);
    return single;
}

/* The maximum number of priorities in one call, because their arrays are on the stack. */
enum { MOST_PUT = 1024 };

/* Set the leaves of rows to powers of priorities. Return the number of rows whose leaf is not
   above 0, or -1, with nothing changed, if Python code must handle the call. */
static Py_ssize_t put_given(const Table *table, const Tree *tree, const Powers *powers,
                              const Given *drawn, const Given *index, const Given *priority,
                              const int64_t *where)
{
    int64_t slot[MOST_PUT];
    float leaf[MOST_PUT];
    const Py_ssize_t count = index->count;
    if (count != priority->count || count > MOST_PUT || index->size != sizeof(int64_t) ||
        (priority->size != sizeof(double) && priority->size != sizeof(float)) ||
        !fits_tree(tree, where))
        return -1;
    int right = 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        slot[i] = whole_at(index, i);
        if (drawn->first) {
            if (slot[i] < 0 || slot[i] >= drawn->count)
                return -1;
            FETCH(drawn->first + slot[i] * drawn->stride);
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t row = drawn->first ? whole_at(drawn, slot[i]) - 1 : slot[i];
        right &= row >= 0 && row < where[N_MOST];
        slot[i] = fetch_slot(table, where, row);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const double given = real_at(priority, i), number = given + powers->added[0];
        leaf[i] = (float)power_of(powers, number);
        right &= (given >= 0) & (number >= DBL_MIN) & (number <= DBL_MAX) & (leaf[i] >= FLT_MIN) &
                 (leaf[i] <= FLT_MAX);
    }
    return right ? put_above_0(table, tree, slot, leaf, count) : -1;
}

/* put_priorities(table, powers, drawn, index, priorities, ring, base, first, stop, most): see
   `TreeKernel`. */
static PyObject *put_priorities(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Tree tree;
    Given drawn = {0}, index = {0}, priority = {0};
    Py_ssize_t found = -1;
    int64_t where[NUMBERING_WORDS_OF_ROWS];
    if (want(given, 5 + NUMBERING_WORDS_OF_ROWS) < 0 ||
        whole_numbers(args + 5, where, NUMBERING_WORDS_OF_ROWS) < 0)
        return NULL;
    const Powers *powers = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred() || open_tree(args[0], &table, &tree) < 0)
        return NULL;
    if ((args[2] == Py_None || open_given(args[2], &drawn, "ql") == 0) &&
        open_given(args[3], &index, "ql") == 0 && open_given(args[4], &priority, "df") == 0)
        found = put_given(&table, &tree, powers, &drawn, &index, &priority, where);
    close_given(&priority);
    close_given(&index);
    close_given(&drawn);
    close_table(&table);
    return PyLong_FromSsize_t(found);
}
