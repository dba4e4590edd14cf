/* Tables of addresses, and functions that copy and commit rows, for the extensions of storage and
   collector.

   The arguments of the extensions are tables of numbers, int64 in native byte order: the
   addresses, sizes and counts of arrays. The code does not depend on NumPy or torch, and uses
   Python's stable ABI.

   Ownership: the extensions own no memory except their stack, and free nothing. A table is a
   Python bytes object. `open_table` acquires its buffer, which keeps the table alive during the
   call. The table does not keep the arrays at its addresses alive. The Python objects named in the
   comments own these arrays, keep them alive while they use the table, and keep every index within
   bounds.

   `span` states which bytes of an array the code uses. A debug build (TALLYROLL_DEBUG, see
   CONTRIBUTING) checks these bytes. For a debug build, Python puts the size of each array before
   the words of a table. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef TALLYROLL_DEBUG
#include <sanitizer/common_interface_defs.h>
#include <stdio.h>
#include <stdlib.h>
#endif

typedef struct Table {
    Py_buffer buffer;
    const int64_t *words;
    Py_ssize_t count;
#ifdef TALLYROLL_DEBUG
    const int64_t *sizes; /* in bytes, of the array at each word (-1: unknown); NULL: no sizes */
    struct Table *outer;
#endif
} Table;

static inline char *at(int64_t address)
{
    return (char *)(intptr_t)address;
}

#ifdef TALLYROLL_DEBUG

#define TABLE_WITH_SIZES 0x73657a6973206854 /* the first word; sizes and words follow */

static _Thread_local Table *open_tables; /* the most recently opened table */

/* Print the message, print a stack trace to the log of the sanitizers, and abort the process. */
static inline void fail(const char *message, const char *file, int line)
{
    fprintf(stderr, "%s:%d: %s\n", file, line, message);
    __sanitizer_print_stack_trace();
    abort();
}

static inline void note_table(Table *table)
{
    table->sizes = NULL;
    if (table->count % 2 && table->words[0] == TABLE_WITH_SIZES) {
        table->count /= 2;
        table->sizes = table->words + 1;
        table->words = table->sizes + table->count;
    }
    table->outer = open_tables;
    open_tables = table;
}

static inline void forget_table(Table *table)
{
    Table **found = &open_tables;
    while (*found && *found != table)
        found = &(*found)->outer;
    if (!*found)
        fail("a table is not open", __FILE__, __LINE__);
    *found = table->outer;
}

static inline char *checked_span(const int64_t *word, int64_t first, int64_t nbytes,
                                 const char *file, int line)
{
    char message[128];
    int64_t size = -1;
    const Table *table = open_tables;
    while (table && (word < table->words || word >= table->words + table->count))
        table = table->outer;
    if (!table)
        fail("an address is in no table", file, line);
    if (table->sizes)
        size = table->sizes[word - table->words];
    if (first < 0 || nbytes < 0 || (size >= 0 && (first > size || nbytes > size - first)) ||
        (!*word && nbytes)) {
        snprintf(message, sizeof message, "expected bytes %lld to %lld of an array, got %lld",
                 (long long)first, (long long)(first + nbytes), (long long)size);
        fail(message, file, line);
    }
    return at(*word) + first;
}

#define span(word, first, nbytes) checked_span(&(word), first, nbytes, __FILE__, __LINE__)
#define REQUIRE(holds)                                                                             \
    do                                                                                             \
        if (!(holds))                                                                              \
            fail("expected " #holds, __FILE__, __LINE__);                                          \
    while (0)

#else

#define note_table(table) ((void)0)
#define forget_table(table) ((void)0)
/* The address of byte `first` of an array. The code uses `nbytes` bytes from there on. `word` is a
   word of an open table, with the address of the array. */
#define span(word, first, nbytes) ((void)(nbytes), at(word) + (first))
#define REQUIRE(holds) ((void)0)

#endif

static inline void close_table(Table *table)
{
    forget_table(table);
    PyBuffer_Release(&table->buffer);
}

/* Open a buffer as int64 words. Raise ValueError if it has fewer than `least` words. The caller
   must close the table. */
static inline int open_table(PyObject *object, Table *table, Py_ssize_t least)
{
    if (PyObject_GetBuffer(object, &table->buffer, PyBUF_SIMPLE) < 0)
        return -1;
    table->words = (const int64_t *)table->buffer.buf;
    table->count = table->buffer.len / (Py_ssize_t)sizeof(int64_t);
    note_table(table);
    if (table->count < least) {
        close_table(table);
        PyErr_SetString(PyExc_ValueError, "a table is too short");
        return -1;
    }
    return 0;
}

static inline int want(Py_ssize_t got, Py_ssize_t wanted)
{
    if (got == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, got);
    return -1;
}

#ifdef __GNUC__
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) (void)(address)
#endif
#define LINE_NBYTES 64
#define FETCHED_NBYTES 4096 /* per row; the processor prefetches the rest on its own */

static inline void fetch(const char *row, int64_t size)
{
    for (int64_t byte = 0; byte < size && byte < FETCHED_NBYTES; byte += LINE_NBYTES)
        FETCH(row + byte);
}

/* Words that Python sets or reads by name. A list of names defines the members of a struct or the
   constants of an enum, and `export_names` exports it. Python puts the words of a table in this
   order (`Extension.in_order`), and compares its own lists with the exported ones
   (`Extension.require_names`). */
#define MEMBER(name) int64_t name;
#define NAME(name) #name " "
#define ARRAY(type, name, count) type name[count];
#define NAMED(type, name, ...) #name " "

typedef struct {
    const char *list, *names;
} Names;

static inline int export_names(PyObject *module, const Names *lists, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (PyModule_AddStringConstant(module, lists[i].list, lists[i].names) < 0)
            return -1;
#ifdef TALLYROLL_DEBUG
    return PyModule_AddIntConstant(module, "TABLE_WITH_SIZES", TABLE_WITH_SIZES);
#else
    return 0;
#endif
}

/* Open buffers, the last of which is writable. The caller must release them. If one cannot be
   opened, return -1 with none of them open. */
static inline int open_buffers(PyObject *const *objects, Py_buffer *buffers, int count)
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

static inline void release_buffers(Py_buffer *buffers, int count)
{
    while (count-- > 0)
        PyBuffer_Release(&buffers[count]);
}

/* A column in a table of `copy_rows`: the address of slot 0 in the target, the address of row 0 in
   the source, and the size of a row in bytes. */
#define COLUMN(WORD) WORD(target) WORD(source) WORD(row_nbytes)
typedef struct { COLUMN(MEMBER) } Column;
enum { COLUMN_WORDS = sizeof(Column) / sizeof(int64_t) };

static inline const Column *first_column(const Table *table)
{
    return (const Column *)table->words;
}

static inline const Column *end_of_columns(const Table *table)
{
    return first_column(table) + table->count / COLUMN_WORDS;
}

/* Release the GIL during a large copy. For a small copy, releasing it would take as long as
   copying. During the copy, the calling Columns keeps its maps alive, even if another thread maps
   the files again. The caller keeps the other arrays alive. */
static inline PyThreadState *let_others_run(const Table *table, int64_t count)
{
    int64_t row = 0;
    for (const Column *column = first_column(table); column < end_of_columns(table); column++)
        row += column->row_nbytes;
    return row * count > (1 << 16) ? PyEval_SaveThread() : NULL;
}

/* Copy rows [first, first + count) of every source to slots from `slot` on. In a commit, the
   targets are the storage's maps, which Columns owns, and the sources are the slab, which
   FixedRows keeps alive. */
static inline void copy_columns(const Table *table, int64_t slot, int64_t first, int64_t count)
{
    PyThreadState *others = let_others_run(table, count);
    for (const Column *column = first_column(table); column < end_of_columns(table); column++) {
        int64_t size = column->row_nbytes;
        memcpy(span(column->target, slot * size, count * size),
               span(column->source, first * size, count * size), (size_t)(count * size));
    }
    if (others)
        PyEval_RestoreThread(others);
}

/* The marked rows among the first `cells` rows. If `lanes` is 0, they are in memory order.
   Otherwise a slot has `lanes` rows, and the marked rows are ordered by lane. */
typedef struct {
    const char *marks;
    int64_t cells, lanes;
} Marked;

/* Copy the marked rows, `size` bytes each, to adjacent rows of `target`. */
static inline void take_marked(char *target, const char *source, int64_t size, const Marked *rows)
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

/* Copy the `count` marked rows of every source to slots from `slot` on. */
static inline void copy_marked(const Table *table, int64_t slot, int64_t count, const Marked *rows)
{
    PyThreadState *others = let_others_run(table, count);
    for (const Column *column = first_column(table); column < end_of_columns(table); column++)
        take_marked(span(column->target, slot * column->row_nbytes, count * column->row_nbytes),
                    span(column->source, 0, rows->cells * column->row_nbytes), column->row_nbytes,
                    rows);
    if (others)
        PyEval_RestoreThread(others);
}

/* Store a word that other processes may read at any time. A reader that sees the word also sees
   every earlier store. `where` points into the map of the header, which Header owns. */
static inline void publish(char *where, uint64_t word)
{
    __atomic_store_n((uint64_t *)where, word, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Return a count with its check bits. */
static inline uint64_t word_of(int64_t count)
{
    uint32_t bits = 0;
    for (int i = 0; i < 6; i++) {
        bits ^= (uint32_t)((count >> (8 * i)) & 0xFF) << 8;
        for (int bit = 0; bit < 8; bit++)
            bits = bits & 0x8000 ? bits << 1 ^ 0x1021 : bits << 1;
    }
    return (uint64_t)count | (uint64_t)(bits & 0xFFFF) << 48;
}

/* Return the CRC-32 `crc`, continued over more bytes. The loop processes eight bytes at a time. Table k
   has the effect of a byte that is followed by k more bytes. */
static inline uint32_t checksum(uint32_t crc, const char *bytes, size_t length)
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

static inline char *little_endian(char *to, uint64_t number, int nbytes)
{
    for (int i = 0; i < nbytes; i++)
        *to++ = (char)(number >> (8 * i));
    return to;
}

/* The counts of a storage that its writer caches: a block of words, which Header owns. */
#define COMMIT(WORD) WORD(head) WORD(reserve) WORD(floor) WORD(sequence) WORD(commits)
typedef struct { COMMIT(MEMBER) } Commit;

/* Addresses in the map of the header, which Header owns: of two counts, of the slot for records
   with even sequence numbers, and of the slot for records with odd ones. */
#define HEADER(WORD) WORD(reserve) WORD(head) WORD(even_record) WORD(odd_record)
typedef struct { HEADER(MEMBER) } Header;
enum { HEADER_WORDS = sizeof(Header) / sizeof(int64_t) };
#define SEAL_NBYTES 28

/* Return 1 if the last commit was not interrupted and no other process writes. */
static inline int can_commit(const Commit *known)
{
    return known->head >= 0 && known->reserve == known->head;
}

/* Commit rows: store `reserve`, copy the rows, write the record, and store `head`. Then update the
   counts in `known`. The sequence number of the record, the first word of its seal, is written
   last. The rows are the marked ones, or `count` rows from `first` on if `marked` is NULL. */
static inline void commit(const Table *table, int64_t slot, int64_t first, int64_t count,
                   const Marked *marked, const Header *header, Commit *known, const char *record,
                   size_t length)
{
    Commit after = *known;
    after.reserve = after.head += count;
    after.sequence++;
    after.commits++;
    const int64_t nbytes = SEAL_NBYTES + (int64_t)length;
    char seal[SEAL_NBYTES], *to = after.sequence % 2 ? span(header->odd_record, 0, nbytes)
                                                     : span(header->even_record, 0, nbytes);
    char *end = little_endian(seal, (uint64_t)after.sequence, 8);
    end = little_endian(end, (uint64_t)after.head, 8);
    end = little_endian(end, length, 8);
    little_endian(end, checksum(checksum(0, seal, 24), record, length), 4);
    uint64_t sequence;
    const uint64_t word = word_of(after.head);
    publish(span(header->reserve, 0, 8), word);
    if (marked)
        copy_marked(table, slot, count, marked);
    else
        copy_columns(table, slot, first, count);
    memcpy(to + SEAL_NBYTES, record, length);
    memcpy(to + sizeof sequence, seal + sizeof sequence, SEAL_NBYTES - sizeof sequence);
    memcpy(&sequence, seal, sizeof sequence);
    publish(to, sequence);
    publish(span(header->head, 0, 8), word);
    *known = after;
}
