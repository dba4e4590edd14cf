/* A tree of sums, for draws in proportion to numbers: `_kernel.c` includes this file.

   `sampling/sum_tree.py` describes the tree, and does the same in NumPy, bit for bit: the children
   0, 4, 8 and 12 of a node are a group, so 1, 5, 9 and 13, and so on; a sum of a node is that of its
   groups, one after the other, in float64, and a sum of a group that of its children. SumTree keeps the arrays at the addresses of its
   table, and the table; the buffers of a call belong to its caller. */

#define FAN_OUT 16
#define GROUPS 4
#define AHEAD 8 /* nodes that are fetched while one is summed up */

/* Children of one node, that are nodes themselves: their sums, the least leaf above 0 of each
   (infinite: none), and the largest leaf. */
typedef struct {
    double sum[FAN_OUT];
    float least[FAN_OUT], most[FAN_OUT];
} Block;

/* The words of a table: the leaves, float32, their number, a multiple of FAN_OUT, and the number of
   levels above them. For each of these then the address of its blocks, and the number of its nodes.
   The last level has one node. */
#define TREE(WORD) WORD(leaves) WORD(slots) WORD(levels)
typedef struct { TREE(MEMBER) } Tree;
enum { TREE_WORDS = sizeof(Tree) / sizeof(int64_t) };
enum { T_BLOCKS, T_NODES, LEVEL_WORDS };

static inline Block *blocks_of(const Table *table, int64_t level)
{
    return (Block *)at(table->words[TREE_WORDS + level * LEVEL_WORDS + T_BLOCKS]);
}

/* Open the table of a tree. The caller must release it. */
static int open_tree(PyObject *object, Table *table, Tree *tree)
{
    if (open_table(object, table, TREE_WORDS + LEVEL_WORDS) < 0)
        return -1;
    memcpy(tree, table->words, sizeof(Tree));
    if (tree->levels > 0 && table->count >= TREE_WORDS + tree->levels * LEVEL_WORDS)
        return 0;
    PyBuffer_Release(&table->buffer);
    PyErr_SetString(PyExc_ValueError, "a table is too short");
    return -1;
}

/* Sum up groups of children, which are numbers of either type. */
#define SUM_GROUPS(child, group)                                                                   \
    double group[GROUPS];                                                                          \
    for (int j = 0; j < GROUPS; j++)                                                               \
        group[j] = (child)[j];                                                                     \
    for (int i = GROUPS; i < FAN_OUT; i += GROUPS)                                                 \
        for (int j = 0; j < GROUPS; j++)                                                           \
            group[j] += (child)[i + j]

static inline double sum_of(const double *group)
{
    return ((group[0] + group[1]) + group[2]) + group[3];
}

static inline float lower(float one, float other)
{
    return one < other ? one : other;
}

static inline float higher(float one, float other)
{
    return one > other ? one : other;
}

/* Write a node of which the leaves, or nodes, are known four by four. */
static inline void write_node(Block *blocks, int64_t node, double sum, const float *least,
                              const float *most)
{
    Block *block = blocks + node / FAN_OUT;
    block->sum[node % FAN_OUT] = sum;
    block->least[node % FAN_OUT] = lower(lower(least[0], least[1]), lower(least[2], least[3]));
    block->most[node % FAN_OUT] = higher(higher(most[0], most[1]), higher(most[2], most[3]));
}

/* Sum up the leaves of a node of the lowest level. */
static void renew_lowest(Block *blocks, int64_t node, const float *leaf)
{
    float least[4] = {INFINITY, INFINITY, INFINITY, INFINITY}, most[4] = {0, 0, 0, 0};
    leaf += node * FAN_OUT;
    SUM_GROUPS(leaf, group);
    for (int i = 0; i < FAN_OUT; i += 4)
        for (int j = 0; j < 4; j++) {
            least[j] = lower(leaf[i + j] > 0 ? leaf[i + j] : INFINITY, least[j]);
            most[j] = higher(leaf[i + j], most[j]);
        }
    write_node(blocks, node, sum_of(group), least, most);
}

/* Sum up the nodes of a node of a higher level. */
static void renew_higher(Block *blocks, int64_t node, const Block *child)
{
    float least[4] = {INFINITY, INFINITY, INFINITY, INFINITY}, most[4] = {0, 0, 0, 0};
    child += node;
    SUM_GROUPS(child->sum, group);
    for (int i = 0; i < FAN_OUT; i += 4)
        for (int j = 0; j < 4; j++) {
            least[j] = lower(child->least[i + j], least[j]);
            most[j] = higher(child->most[i + j], most[j]);
        }
    write_node(blocks, node, sum_of(group), least, most);
}

static inline void renew(const Table *table, const Tree *tree, int64_t level, int64_t node)
{
    if (level == 0)
        renew_lowest(blocks_of(table, 0), node, (const float *)at(tree->leaves));
    else
        renew_higher(blocks_of(table, level), node, blocks_of(table, level - 1));
}

/* Fetch the children of a node. */
static inline void fetch_below(const Table *table, const Tree *tree, int64_t level, int64_t node)
{
    if (level == 0)
        FETCH((const float *)at(tree->leaves) + node * FAN_OUT);
    else
        fetch((const char *)(blocks_of(table, level - 1) + node), sizeof(Block));
}

/* Sum up all nodes from `level` on that are above the nodes [first, last] of that level. */
static void renew_range(const Table *table, const Tree *tree, int64_t level, int64_t first,
                        int64_t last)
{
    for (; level < tree->levels; level++) {
        for (int64_t node = first; node <= last; node++)
            renew(table, tree, level, node);
        first /= FAN_OUT;
        last /= FAN_OUT;
    }
}

/* Take a buffer of `count` numbers of `size` bytes each; the caller must release it. */
static int open_numbers(PyObject *object, Py_buffer *buffer, Py_ssize_t size, Py_ssize_t *count)
{
    if (PyObject_GetBuffer(object, buffer, PyBUF_CONTIG) < 0)
        return -1;
    if (*count < 0)
        *count = buffer->len / size;
    if (buffer->len == *count * size)
        return 0;
    PyBuffer_Release(buffer);
    PyErr_SetString(PyExc_ValueError, "arrays differ in length");
    return -1;
}

/* Set leaves of slots of the tree, and sum them up; the slots are used up. */
static void put(const Table *table, const Tree *tree, int64_t *slot, const float *number,
                Py_ssize_t count)
{
    float *leaf = (float *)at(tree->leaves);
    int64_t first = tree->slots, last = -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        first = slot[i] < first ? slot[i] : first;
        last = slot[i] > last ? slot[i] : last;
        leaf[slot[i]] = number[i];
    }
    for (int64_t level = 0; count && level < tree->levels; level++) {
        first /= FAN_OUT;
        last /= FAN_OUT;
        if (last - first < count) { /* nearly every node is above some of them */
            renew_range(table, tree, level, first, last);
            break;
        }
        int64_t before = -1;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (i + AHEAD < count) {
                const int64_t later = slot[i + AHEAD] / FAN_OUT;
                fetch((const char *)(blocks_of(table, level) + later / FAN_OUT), sizeof(Block));
            }
            slot[i] /= FAN_OUT;
            if (slot[i] != before)
                renew(table, tree, level, slot[i]);
            before = slot[i];
        }
    }
}

/* Read whole numbers from the arguments; return 0, or -1 after an error. */
static int whole_numbers(PyObject *const *args, int64_t *numbers, int count)
{
    for (int i = 0; i < count; i++)
        numbers[i] = PyLong_AsLongLong(args[i]);
    return PyErr_Occurred() ? -1 : 0;
}

/* Where the rows lie: in a ring row r is in slot r % ring, else in r - base. The rows [first, stop)
   have leaves, and `most` is one more than the largest row that there ever was. */
enum { N_RING, N_BASE, N_FIRST, N_STOP, N_MOST, NUMBERING_WORDS_OF_ROWS };

/* put_leaves(table, rows, leaves, ring, base, first, stop, most): the rows are used up. */
static PyObject *put_leaves(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Tree tree;
    Py_buffer places, numbers;
    PyObject *result = NULL;
    Py_ssize_t count = -1, left = 0;
    int64_t where[NUMBERING_WORDS_OF_ROWS];
    if (want(given, 3 + NUMBERING_WORDS_OF_ROWS) < 0 ||
        whole_numbers(args + 3, where, NUMBERING_WORDS_OF_ROWS) < 0 ||
        open_tree(args[0], &table, &tree) < 0)
        return NULL;
    if (open_numbers(args[1], &places, sizeof(int64_t), &count) < 0)
        goto no_places;
    if (open_numbers(args[2], &numbers, sizeof(float), &count) < 0)
        goto no_numbers;
    const int64_t ring = where[N_RING], first = where[N_FIRST], stop = where[N_STOP];
    const float *leaf = (const float *)at(tree.leaves);
    int64_t *row = places.buf;
    float *number = numbers.buf;
    int wrong = ring ? ring < 0 || ring > tree.slots || first < 0
                     : first < where[N_BASE] || stop - where[N_BASE] > tree.slots;
    for (Py_ssize_t i = 0; i < count; i++)
        wrong |= row[i] < 0 || row[i] >= where[N_MOST];
    if (wrong) {
        PyErr_SetString(PyExc_IndexError, "a row is not in the tree");
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const int there = row[i] >= first && row[i] < stop;
        row[i] = there ? ring ? row[i] % ring : row[i] - where[N_BASE] : -1;
        FETCH(leaf + (there ? row[i] : 0));
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (row[i] >= 0 && leaf[row[i]] > 0) {
            row[left] = row[i];
            number[left++] = number[i];
        }
    put(&table, &tree, row, number, left);
    result = PyLong_FromSsize_t(count - left);
done:
    PyBuffer_Release(&numbers);
no_numbers:
    PyBuffer_Release(&places);
no_places:
    PyBuffer_Release(&table.buffer);
    return result;
}

/* set_leaves(table, slots, leaf): the slots are used up. */
static PyObject *set_leaves(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Tree tree;
    Py_buffer places, numbers;
    PyObject *result = NULL;
    Py_ssize_t count = -1;
    if (want(given, 3) < 0 || open_tree(args[0], &table, &tree) < 0)
        return NULL;
    if (open_numbers(args[1], &places, sizeof(int64_t), &count) < 0)
        goto no_places;
    if (open_numbers(args[2], &numbers, sizeof(float), &count) < 0)
        goto no_numbers;
    int64_t *slot = places.buf;
    int wrong = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        wrong |= slot[i] < 0 || slot[i] >= tree.slots;
    if (wrong) {
        PyErr_SetString(PyExc_IndexError, "a slot is not in the tree");
        goto done;
    }
    put(&table, &tree, slot, numbers.buf, count);
    Py_INCREF(Py_None);
    result = Py_None;
done:
    PyBuffer_Release(&numbers);
no_numbers:
    PyBuffer_Release(&places);
no_places:
    PyBuffer_Release(&table.buffer);
    return result;
}

/* renew_sums(table, first, stop): of the leaves of slots [first, stop). */
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
        PyBuffer_Release(&table.buffer);
        PyErr_SetString(PyExc_IndexError, "a slot is not in the tree");
        return NULL;
    }
    if (first < stop) { /* others may run meanwhile: the caller holds a lock of the tree */
        PyThreadState *others = stop - first > (1 << 16) ? PyEval_SaveThread() : NULL;
        renew_range(&table, &tree, 0, first / FAN_OUT, (stop - 1) / FAN_OUT);
        if (others)
            PyEval_RestoreThread(others);
    }
    PyBuffer_Release(&table.buffer);
    Py_RETURN_NONE;
}

/* Return the largest number below a positive one. */
static inline double just_below(double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    bits--;
    memcpy(&number, &bits, sizeof bits);
    return number;
}

/* Return the number of the part in which `mass` lies of four; and keep in `mass` where it lies in that part, below its end, however that is rounded. */
static inline int part_of(const double *part, double *mass)
{
    int number = 0;
    double sum = 0, before = 0;
    for (int i = 0; i < GROUPS; i++) {
        sum += part[i];
        const int passed = sum <= *mass;
        number += passed;
        before = passed ? sum : before;
    }
    const double left = *mass - before, end = part[number];
    *mass = left < end ? left : just_below(end);
    return number;
}

/* Choose the child of a node in which a `mass` of it lies, as `part_of` does. */
#define CHOOSE(child, mass)                                                                        \
    SUM_GROUPS(child, group);                                                                      \
    const int j = part_of(group, mass);                                                            \
    const double part[GROUPS] = {(child)[j], (child)[GROUPS + j], (child)[2 * GROUPS + j],         \
                                 (child)[3 * GROUPS + j]};                                         \
    return GROUPS * part_of(part, mass) + j

static inline int choose_node(const double *child, double *mass) { CHOOSE(child, mass); }
static inline int choose_leaf(const float *child, double *mass) { CHOOSE(child, mass); }

/* draw_rows(table, uniform, rows, leaves, ring, base, stop): the uniform numbers are used up. Of a
   ring, rows are the newest ones below `stop` in their slots. */
static PyObject *draw_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Tree tree;
    Py_buffer masses, places, numbers;
    PyObject *result = NULL;
    Py_ssize_t count = -1;
    int64_t where[3];
    if (want(given, 7) < 0 || whole_numbers(args + 4, where, 3) < 0 || open_tree(args[0], &table, &tree) < 0)
        return NULL;
    if (open_numbers(args[1], &masses, sizeof(double), &count) < 0)
        goto no_masses;
    if (open_numbers(args[2], &places, sizeof(int64_t), &count) < 0)
        goto no_places;
    if (open_numbers(args[3], &numbers, sizeof(float), &count) < 0)
        goto no_numbers;
    double *mass = masses.buf;
    int64_t *node = places.buf;
    float *leaf = numbers.buf;
    const double total = blocks_of(&table, tree.levels - 1)->sum[0];
    if (!(total > 0)) {
        PyErr_SetString(PyExc_ValueError, "a tree without leaves above 0");
        goto done;
    }
    const double most = just_below(total);
    for (Py_ssize_t i = 0; i < count; i++) {
        const double part = mass[i] * total;
        mass[i] = part < most ? part : most;
        node[i] = 0;
    }
    /* Level by level, so that many nodes are on their way from memory at once. */
    for (int64_t level = tree.levels - 2; level >= 0; level--) {
        const Block *blocks = blocks_of(&table, level);
        for (Py_ssize_t i = 0; i < count; i++) {
            node[i] = node[i] * FAN_OUT + choose_node(blocks[node[i]].sum, &mass[i]);
            fetch_below(&table, &tree, level, node[i]);
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const float *child = (const float *)at(tree.leaves) + node[i] * FAN_OUT;
        const int number = choose_leaf(child, &mass[i]);
        leaf[i] = child[number];
        node[i] = node[i] * FAN_OUT + number;
    }
    const int64_t ring = where[0], base = where[1], last = where[2] - 1;
    for (Py_ssize_t i = 0; i < count; i++) /* a slot is below the ring, and none is above 0 beyond */
        node[i] = ring > 0 ? last - ((last - node[i]) % ring + ring) % ring : node[i] + base;
    Py_INCREF(Py_None);
    result = Py_None;
done:
    PyBuffer_Release(&numbers);
no_numbers:
    PyBuffer_Release(&places);
no_places:
    PyBuffer_Release(&masses);
no_masses:
    PyBuffer_Release(&table.buffer);
    return result;
}

/* are_leaves(priorities, leaves): return whether all priorities, float64, are 0 or above, and all
   leaves, float32, are normal numbers above 0. */
static PyObject *are_leaves(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer priorities, leaves;
    Py_ssize_t count = -1;
    if (want(given, 2) < 0 || open_numbers(args[0], &priorities, sizeof(double), &count) < 0)
        return NULL;
    if (open_numbers(args[1], &leaves, sizeof(float), &count) < 0) {
        PyBuffer_Release(&priorities);
        return NULL;
    }
    const double *priority = priorities.buf;
    const float *leaf = leaves.buf;
    int right = 1;
    for (Py_ssize_t i = 0; i < count; i++)
        right &= (priority[i] >= 0) & (leaf[i] >= FLT_MIN) & (leaf[i] <= FLT_MAX);
    PyBuffer_Release(&leaves);
    PyBuffer_Release(&priorities);
    return PyBool_FromLong(right);
}
