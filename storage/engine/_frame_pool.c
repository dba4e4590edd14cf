/* Functions that place frames in a pool, and read them. `_kernel.c` includes this file.

   `storage/engine/frame_pool.py` describes the pool, and implements the same functions in NumPy
   with bit-identical results. FrameWriter keeps the table of its pool, and the arrays at its
   addresses, alive. The caller owns the buffers of a call, and the values at the addresses that it
   passes.

   The functions that read trust no number in the pool, because another process may be overwriting a
   segment, or a file may be damaged. They read each number once, and check it before use. */

/* The words of a layout. `segment_frames` is the maximum number of frames in a segment. */
#define FRAMES(WORD)                                                                               \
    WORD(frame_nbytes) WORD(segment_frames) WORD(segment_nbytes) WORD(preamble_nbytes) WORD(delta)
typedef struct { FRAMES(MEMBER) } Frames;

/* The words of a writer, which follow those of its layout:

     tails       int32 [lanes, stack], the positions of each lane's newest next value; there is none
                 if the first position is -1
     open        int64 [lanes], the segment that a lane fills, or -1
     used        int64 [lanes], the number of frames in that segment
     filled      int64 [lanes], the number of bytes in that segment
     last        [lanes, stack frames], a copy of each lane's newest next value of earlier calls
     newest      int64 [lanes], the address of each lane's newest next value
     last_row    int64 [segments], the newest row that needs a frame of the segment, or -1
     free        int64 [segments], segments that were free when they were listed; the last one is
                 taken first
     free_count  int64, the number of segments in `free`
     scratch     memory for one frame */
#define WRITER(WORD)                                                                               \
    WORD(memory) WORD(segments) WORD(stack) WORD(lanes) WORD(tails) WORD(open) WORD(used)          \
    WORD(filled) WORD(last) WORD(newest) WORD(last_row) WORD(free) WORD(free_count) WORD(scratch)
typedef struct { WRITER(MEMBER) } Writer;

enum {
    FRAMES_WORDS = sizeof(Frames) / sizeof(int64_t),
    WRITER_WORDS = sizeof(Writer) / sizeof(int64_t),
    MOST_PER = 1024, /* maximum number of frames in a segment, as in Python */
    MOST_IN_RUN = 0xFFFF, /* maximum number of words that a run skips or replaces */
    WORD_NBYTES = 4
};

/* --- Differences ---------------------------------------------------------------------------- */

static inline int same_word(const char *one, const char *other, int64_t word)
{
    return memcmp(one + word * WORD_NBYTES, other + word * WORD_NBYTES, WORD_NBYTES) == 0;
}

/* Return the index of the first word from `word` on that differs, or `words` if none does. */
static inline int64_t find_difference(const char *one, const char *other, int64_t word,
                                      int64_t words)
{
    for (; word + 16 <= words; word += 16) {
        uint64_t a[8], b[8], differ = 0;
        memcpy(a, one + word * WORD_NBYTES, sizeof a);
        memcpy(b, other + word * WORD_NBYTES, sizeof b);
        for (int i = 0; i < 8; i++)
            differ |= a[i] ^ b[i];
        if (differ)
            break;
    }
    while (word < words && same_word(one, other, word))
        word++;
    return word;
}

/* Encode the words in which `frame` differs from `before`, as runs. A run is the number of equal
   words to skip (the low 16 bits of a word), the number of words to replace (the high 16 bits),
   and the new words. A single equal word within a run is replaced too. Return the number of bytes,
   or -1 if there would be more than `most`. */
static int64_t encode_frame(const char *frame, const char *before, int64_t words, char *to,
                            int64_t most)
{
    int64_t nbytes = 0, word = 0;
    for (;;) {
        int64_t first = find_difference(frame, before, word, words), stop = first + 1;
        if (first == words)
            return nbytes;
        while (stop < words && (!same_word(frame, before, stop) ||
                                (stop + 1 < words && !same_word(frame, before, stop + 1))))
            stop++;
        for (int64_t skip = first - word; first < stop;) {
            const int64_t step = skip < MOST_IN_RUN ? skip : MOST_IN_RUN;
            int64_t count = stop - first < MOST_IN_RUN ? stop - first : MOST_IN_RUN;
            if (skip > step)
                count = 0;
            if (most - nbytes < (1 + count) * WORD_NBYTES)
                return -1;
            const uint32_t head = (uint32_t)(step | count << 16);
            memcpy(to + nbytes, &head, WORD_NBYTES);
            memcpy(to + nbytes + WORD_NBYTES, frame + first * WORD_NBYTES,
                   (size_t)(count * WORD_NBYTES));
            nbytes += (1 + count) * WORD_NBYTES;
            skip -= step;
            first += count;
        }
        word = stop;
    }
}

/* Apply the runs in `from` to `frame`. Return 0, or -1 if a run does not fit. */
static inline int decode_frame(char *frame, int64_t words, const char *from, int64_t nbytes)
{
    while (nbytes >= WORD_NBYTES) {
        const uint32_t head = *(const volatile uint32_t *)from;
        const int64_t skip = head & MOST_IN_RUN, count = head >> 16;
        from += WORD_NBYTES;
        nbytes -= WORD_NBYTES;
        if (skip + count > words || count * WORD_NBYTES > nbytes)
            return -1;
        frame += skip * WORD_NBYTES;
        if (count <= 8)
            for (int64_t i = 0; i < count; i++)
                memcpy(frame + i * WORD_NBYTES, from + i * WORD_NBYTES, WORD_NBYTES);
        else
            memcpy(frame, from, (size_t)(count * WORD_NBYTES));
        frame += count * WORD_NBYTES;
        words -= skip + count;
        from += count * WORD_NBYTES;
        nbytes -= count * WORD_NBYTES;
    }
    return 0;
}

/* --- Writing -------------------------------------------------------------------------------- */

/* The state of a call of `place_frames`. `before` is the newest frame of the lane of row `row`. */
typedef struct {
    const Frames *layout;
    const Writer *pool;
    int64_t row, oldest;
    const char *before;
} Placing;

#define LANES(pool, name) ((int64_t *)span((pool)->name, 0, (pool)->lanes * 8))
#define SEGMENTS(pool, name) ((int64_t *)span((pool)->name, 0, (pool)->segments * 8))

static inline int32_t *tail_of(const Writer *pool, int64_t lane)
{
    const int64_t nbytes = pool->stack * (int64_t)sizeof(int32_t);
    return (int32_t *)span(pool->tails, lane * nbytes, nbytes);
}

static inline char *segment_at(const Placing *placing, int64_t segment)
{
    const Frames *layout = placing->layout;
    return span(placing->pool->memory, layout->preamble_nbytes + segment * layout->segment_nbytes,
                layout->segment_nbytes);
}

/* Return the bytes before the first frame of a segment. */
static inline int64_t begin_of_frames(const Frames *layout)
{
    return layout->delta ? layout->segment_frames * WORD_NBYTES : 0;
}

/* Return the number of frames that still fit in a segment with `used` frames in `filled` bytes,
   even if each is stored whole. */
static inline int64_t frames_that_fit(const Frames *layout, int64_t used, int64_t filled)
{
    const int64_t whole = (layout->segment_nbytes - filled) / layout->frame_nbytes;
    return whole < layout->segment_frames - used ? whole : layout->segment_frames - used;
}

/* Return 1 if the list has enough free segments for `frames` frames of a lane. Remove segments
   from the list to which rows have linked since they were listed. */
static int has_space(const Placing *placing, int64_t lane, int64_t frames)
{
    const Writer *pool = placing->pool;
    const int64_t *last_row = SEGMENTS(pool, last_row);
    int64_t *list = SEGMENTS(pool, free), *count = (int64_t *)span(pool->free_count, 0, 8);
    if (LANES(pool, open)[lane] >= 0)
        frames -= frames_that_fit(placing->layout, LANES(pool, used)[lane],
                                  LANES(pool, filled)[lane]);
    const int64_t each = frames_that_fit(placing->layout, 0, begin_of_frames(placing->layout));
    int64_t found = 0;
    for (int64_t i = *count - 1; frames > found * each && i >= 0; i--) {
        if (last_row[list[i]] < placing->oldest) {
            found++;
            continue;
        }
        memmove(list + i, list + i + 1, (size_t)(*count - i - 1) * sizeof *list);
        --*count;
    }
    return frames <= found * each;
}

/* Open a free segment for a lane. `has_space` has checked that one is listed. Remove the tails
   whose frames are in the segment, so that the next rows of those lanes do not link. */
static void open_segment(const Placing *placing, int64_t lane)
{
    const Writer *pool = placing->pool;
    const int64_t per = placing->layout->segment_frames;
    int64_t *count = (int64_t *)span(pool->free_count, 0, 8);
    REQUIRE(*count > 0);
    const int64_t segment = SEGMENTS(pool, free)[--*count];
    REQUIRE(SEGMENTS(pool, last_row)[segment] < placing->oldest);
    for (int64_t other = 0; other < pool->lanes; other++) {
        int32_t *tail = tail_of(pool, other);
        if (tail[0] < 0)
            continue;
        for (int64_t i = 0; i < pool->stack; i++)
            if (tail[i] / per == segment) {
                tail[0] = -1;
                break;
            }
    }
    LANES(pool, open)[lane] = segment;
    LANES(pool, used)[lane] = 0;
    LANES(pool, filled)[lane] = begin_of_frames(placing->layout);
}

/* Encode a frame of a delta pool to the scratch memory. Return the encoded size; the size of a
   frame if it has to be stored whole; or -1 if it does not fit in the open segment. */
static int64_t encoded_size(const Placing *placing, int64_t lane, const char *frame)
{
    const Writer *pool = placing->pool;
    const int64_t size = placing->layout->frame_nbytes;
    const int64_t left = placing->layout->segment_nbytes - LANES(pool, filled)[lane];
    const char *before = LANES(pool, used)[lane] ? placing->before : span(pool->memory, 0, size);
    const int64_t most = left < size - WORD_NBYTES ? left : size - WORD_NBYTES;
    const int64_t nbytes =
        encode_frame(frame, before, size / WORD_NBYTES, span(pool->scratch, 0, size), most);
    return nbytes < 0 && left >= size ? size : nbytes;
}

static int32_t place_frame(Placing *placing, int64_t lane, const char *frame)
{
    const Writer *pool = placing->pool;
    const Frames *layout = placing->layout;
    int64_t *open = LANES(pool, open), *used = LANES(pool, used), *filled = LANES(pool, filled);
    int64_t nbytes = layout->frame_nbytes;
    if (open[lane] < 0 || used[lane] == layout->segment_frames)
        open_segment(placing, lane);
    if (layout->delta && (nbytes = encoded_size(placing, lane, frame)) < 0) {
        open_segment(placing, lane);
        nbytes = encoded_size(placing, lane, frame);
    }
    char *segment = segment_at(placing, open[lane]);
    REQUIRE(nbytes >= 0 && filled[lane] + nbytes <= layout->segment_nbytes);
    memcpy(segment + filled[lane],
           nbytes == layout->frame_nbytes ? frame : span(pool->scratch, 0, nbytes), (size_t)nbytes);
    filled[lane] += nbytes;
    if (layout->delta)
        ((uint32_t *)segment)[used[lane]] = (uint32_t)filled[lane];
    SEGMENTS(pool, last_row)[open[lane]] = placing->row;
    placing->before = frame;
    return (int32_t)(open[lane] * layout->segment_frames + used[lane]++);
}

/* Return the number of frames of a value to store. Copies of the first frame at the beginning of
   the value, as in a stack after a reset, count once. */
static int64_t distinct_frames(const char *value, int64_t stack, int64_t size)
{
    int64_t copies = 0;
    while (copies < stack - 1 && memcmp(value, value + (copies + 1) * size, (size_t)size) == 0)
        copies++;
    return stack - copies;
}

static void place_value(Placing *placing, int64_t lane, const char *value, int64_t distinct,
                        int32_t *positions)
{
    const int64_t stack = placing->pool->stack, copies = stack - distinct;
    for (int64_t i = copies; i < stack; i++)
        positions[i] = place_frame(placing, lane, value + i * placing->layout->frame_nbytes);
    for (int64_t i = 0; i < copies; i++)
        positions[i] = positions[copies];
}

/* Place the frames of a row, and write their positions. Return 1. If there are too few free
   segments, place no frame and return 0. A row that links marks the segments to which it links as
   needed before its own frames take a segment. */
static int place_row(Placing *placing, int64_t lane, const char *begin, const char *end,
                     int32_t *positions)
{
    const Writer *pool = placing->pool;
    const int64_t stack = pool->stack, size = placing->layout->frame_nbytes;
    int32_t *tail = tail_of(pool, lane);
    const char *newest = at(LANES(pool, newest)[lane]);
    const int links = tail[0] >= 0 && (begin == newest ||
                                       memcmp(begin, newest, (size_t)(stack * size)) == 0);
    const size_t shifted = (size_t)((stack - 1) * size);
    const int shifts =
        stack > 1 && (begin + size == end || memcmp(begin + size, end, shifted) == 0);
    if (links)
        for (int64_t i = 0; i < stack; i++)
            SEGMENTS(pool, last_row)[tail[i] / placing->layout->segment_frames] = placing->row;
    const int64_t of_begin = links ? 0 : distinct_frames(begin, stack, size);
    const int64_t of_end = shifts ? 1 : distinct_frames(end, stack, size);
    if (!has_space(placing, lane, of_begin + of_end))
        return 0;
    placing->before = newest + shifted;
    if (links)
        memcpy(positions, tail, (size_t)stack * sizeof *tail);
    else
        place_value(placing, lane, begin, of_begin, positions);
    if (shifts) {
        memcpy(positions + stack, positions + 1, (size_t)(stack - 1) * sizeof *positions);
        positions[2 * stack - 1] = place_frame(placing, lane, end + shifted);
    } else {
        place_value(placing, lane, end, of_end, positions + stack);
    }
    memcpy(tail, positions + stack, (size_t)stack * sizeof *tail);
    LANES(pool, newest)[lane] = (int64_t)(intptr_t)end;
    return 1;
}

/* Copy the newest next value of each lane that had rows in this call, because the memory of the
   caller is valid only during the call. */
static void keep_newest(const Writer *pool, int64_t value_nbytes)
{
    int64_t *newest = LANES(pool, newest);
    for (int64_t lane = 0; lane < pool->lanes; lane++) {
        char *own = span(pool->last, lane * value_nbytes, value_nbytes);
        if (at(newest[lane]) == own)
            continue;
        memcpy(own, at(newest[lane]), (size_t)value_nbytes);
        newest[lane] = (int64_t)(intptr_t)own;
    }
}

/* place_frames(table, lanes, begins, ends, positions, done, first_row, oldest): place the rows from
   `done` on. Return the number of rows that are placed. It is lower than the number of rows if more
   free segments are needed. The values at the addresses `begins` and `ends` must stay valid until
   all rows are placed. */
static PyObject *place_frames(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Py_buffer buffers[4];
    if (want(given, 8) < 0)
        return NULL;
    int64_t done = PyLong_AsLongLong(args[5]);
    const int64_t first_row = PyLong_AsLongLong(args[6]);
    const int64_t oldest = PyLong_AsLongLong(args[7]);
    if (PyErr_Occurred() || open_table(args[0], &table, FRAMES_WORDS + WRITER_WORDS) < 0)
        return NULL;
    if (open_buffers(args + 1, buffers, 4) < 0) {
        close_table(&table);
        return NULL;
    }
    const Frames *layout = (const Frames *)table.words;
    const Writer *pool = (const Writer *)(table.words + FRAMES_WORDS);
    const int64_t *lanes = (const int64_t *)buffers[0].buf;
    const int64_t *begins = (const int64_t *)buffers[1].buf;
    const int64_t *ends = (const int64_t *)buffers[2].buf;
    int32_t *positions = (int32_t *)buffers[3].buf;
    const int64_t count = buffers[0].len / 8, value_nbytes = pool->stack * layout->frame_nbytes;
    int fit = buffers[1].len == count * 8 && buffers[2].len == count * 8 && done >= 0 &&
              buffers[3].len == count * 2 * pool->stack * (int64_t)sizeof(int32_t);
    for (int64_t i = 0; fit && i < count; i++)
        fit = lanes[i] >= 0 && lanes[i] < pool->lanes;
    if (fit) {
        PyThreadState *others =
            (count - done) * value_nbytes > (1 << 16) ? PyEval_SaveThread() : NULL;
        Placing placing = {layout, pool, 0, oldest, NULL};
        for (; done < count; done++) {
            placing.row = first_row + done;
            if (!place_row(&placing, lanes[done], at(begins[done]), at(ends[done]),
                           positions + 2 * pool->stack * done))
                break;
        }
        if (done == count)
            keep_newest(pool, value_nbytes);
        if (others)
            PyEval_RestoreThread(others);
    }
    release_buffers(buffers, 4);
    close_table(&table);
    if (fit)
        return PyLong_FromLongLong(done);
    PyErr_SetString(PyExc_ValueError, "lanes, values and positions differ in number");
    return NULL;
}

static PyObject *refuse_position(int64_t position, int64_t count)
{
    return PyErr_Format(PyExc_IndexError,
                        "positions: expected frames below %lld, the number in the pool, got %lld.",
                        (long long)count, (long long)position);
}

/* mark_rows(positions, numbers, last_row, per): for each segment, set the newest row that needs
   one of its frames. The numbers of the rows ascend. Raise IndexError if a position is not in the
   pool. The caller owns the arrays. The function holds their buffers until it returns. */
static PyObject *mark_rows(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer buffers[3];
    if (want(given, 4) < 0)
        return NULL;
    const int64_t per = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred() || open_buffers(args, buffers, 3) < 0)
        return NULL;
    const int32_t *position = (const int32_t *)buffers[0].buf;
    const int64_t *numbers = (const int64_t *)buffers[1].buf;
    int64_t *last_row = (int64_t *)buffers[2].buf;
    const int64_t rows = buffers[1].len / 8, frames = buffers[2].len / 8 * per;
    const int64_t wide = rows ? buffers[0].len / (int64_t)sizeof *position / rows : 0;
    int64_t wrong = 0, first = 0, stop = 0, segment = 0;
    int inside = per > 0;
    for (int64_t row = 0; inside && row < rows; row++)
        for (int64_t i = 0; i < wide; i++) {
            const int64_t each = *(const volatile int32_t *)position++;
            if (each < first || each >= stop) {
                if (each < 0 || each >= frames) {
                    inside = 0;
                    wrong = each;
                    break;
                }
                segment = (uint32_t)each / (uint32_t)per;
                first = segment * per;
                stop = first + per;
            }
            last_row[segment] = numbers[row];
        }
    release_buffers(buffers, 3);
    if (!inside)
        return refuse_position(wrong, frames);
    Py_RETURN_NONE;
}

/* --- Reading -------------------------------------------------------------------------------- */

/* Return the size of a frame whose bounds were read from a segment, or -1 if they are invalid. */
static inline int64_t bounded(const Frames *layout, int64_t begin, int64_t end)
{
    const int wrong = begin < begin_of_frames(layout) || end < begin ||
                      end > layout->segment_nbytes || (begin | end) % WORD_NBYTES;
    return wrong ? -1 : end - begin;
}

/* The place of a decoded frame. `broken` is 1 if its segment could not be decoded up to it. */
typedef struct {
    int64_t segment, index;
    int broken;
} Decoded;

/* Decode the frame at a position to `frame`, and return its place. `previous` is a decoded frame,
   and `known` is its place. If it is an earlier frame of the same segment, decoding continues from
   it. */
static Decoded read_delta(const Frames *layout, const char *memory, int64_t position, char *frame,
                          const char *previous, Decoded known)
{
    const int64_t size = layout->frame_nbytes, per = layout->segment_frames;
    Decoded wanted = {position / per, position % per, 0};
    const char *segment =
        memory + layout->preamble_nbytes + wanted.segment * layout->segment_nbytes;
    const int onward = known.segment == wanted.segment && known.index <= wanted.index;
    const int64_t first = onward ? known.index + 1 : 0;
    int64_t bounds[MOST_PER + 1], next = wanted.index + 1;
    for (int64_t i = first; i <= next; i++)
        bounds[i] = i ? ((const volatile uint32_t *)segment)[i - 1] : begin_of_frames(layout);
    while (next > first && bounded(layout, bounds[next - 1], bounds[next]) != size)
        next--;
    if (next > first) { /* start from the last frame that is stored whole */
        memcpy(frame, segment + bounds[next - 1], (size_t)size);
    } else if (onward) {
        memcpy(frame, previous, (size_t)size);
        wanted.broken = known.broken;
    } else {
        memcpy(frame, memory, (size_t)size);
    }
    for (; next <= wanted.index && !wanted.broken; next++) {
        const int64_t nbytes = bounded(layout, bounds[next], bounds[next + 1]);
        wanted.broken = nbytes < 0 || decode_frame(frame, size / WORD_NBYTES,
                                                   segment + bounds[next], nbytes) < 0;
    }
    return wanted;
}

#define LOOK_BACK 16 /* number of earlier frames of a row that are searched for a repeated one */

/* Read a position, which may be in a map of a file and have changed since it was checked. Return 0
   for an invalid one. */
static inline int64_t position_at(const int32_t *positions, int64_t i, int64_t frames)
{
    const int64_t position = *(const volatile int32_t *)(positions + i);
    return position >= 0 && position < frames ? position : 0;
}

static inline void fetch_frame(const Frames *layout, const char *memory, int64_t position)
{
    const int64_t size = layout->delta ? layout->segment_nbytes : layout->frame_nbytes;
    const int64_t which = layout->delta ? position / layout->segment_frames : position;
    const char *first = memory + layout->preamble_nbytes + which * size;
    for (int64_t byte = 0; byte < size && byte < 2 * FETCHED_NBYTES; byte += LINE_NBYTES)
        FETCH(first + byte);
}

/* The `wide` frames of each row: the first `split` ones in `first`, the others in `later`. */
typedef struct {
    char *first, *later;
    int64_t wide, split, size;
} Outputs;

static inline char *frame_of(const Outputs *to, int64_t row, int64_t i)
{
    return i < to->split ? to->first + (row * to->split + i) * to->size
                         : to->later + (row * (to->wide - to->split) + i - to->split) * to->size;
}

/* Read the frames of rows from a delta pool. Fast if the frames of a row ascend and are in one
   segment, and if its second stack repeats frames of the first one. */
static void gather_delta(const Frames *layout, const char *memory, int64_t frames,
                         const int32_t *positions, int64_t rows, const Outputs *to)
{
    const int64_t size = layout->frame_nbytes, wide = to->wide;
    for (int64_t row = 0; row < rows; row++, positions += wide) {
        Decoded places[LOOK_BACK] = {{-1, 0, 0}};
        int64_t read[LOOK_BACK];
        if (row + 1 < rows)
            fetch_frame(layout, memory, position_at(positions, wide, frames));
        for (int64_t i = 0; i < wide; i++) {
            const int64_t position = position_at(positions, i, frames);
            char *frame = frame_of(to, row, i);
            int64_t same = i - 1, least = i > LOOK_BACK ? i - LOOK_BACK : 0;
            while (same >= least && read[same % LOOK_BACK] != position)
                same--;
            if (same >= least) {
                memcpy(frame, frame_of(to, row, same), (size_t)size);
                places[i % LOOK_BACK] = places[same % LOOK_BACK];
            } else {
                const Decoded none = {-1, 0, 0};
                const Decoded known = i ? places[(i - 1) % LOOK_BACK] : none;
                const char *previous = i ? frame_of(to, row, i - 1) : frame;
                places[i % LOOK_BACK] =
                    read_delta(layout, memory, position, frame, previous, known);
            }
            read[i % LOOK_BACK] = position;
        }
    }
}

/* Copy frames of a plain pool, adjacent frames of a row's output in one copy. */
static void gather_plain(const Frames *layout, const char *memory, int64_t frames,
                         const int32_t *positions, int64_t rows, const Outputs *to)
{
    const int64_t size = layout->frame_nbytes, wide = to->wide;
    for (int64_t row = 0; row < rows; row++, positions += wide)
        for (int64_t i = 0, run; i < wide; i += run) {
            const int64_t first = position_at(positions, i, frames);
            const int64_t most = (i < to->split ? to->split : wide) - i;
            for (run = 1; run < most; run++)
                if (position_at(positions, i + run, frames) != first + run)
                    break;
            for (int64_t k = i; row + 1 < rows && k < i + run; k++)
                fetch_frame(layout, memory, position_at(positions, wide + k, frames));
            memcpy(frame_of(to, row, i), memory + layout->preamble_nbytes + first * size,
                   (size_t)(run * size));
        }
}

/* read_frames(memory, positions, out, later, layout, wide): read the frames at `positions`, of
   which each `wide` adjacent ones belong to a row. `out` takes as many frames of each row as it has
   space for, and `later` takes the others. Raise IndexError, with nothing read, if a position is
   not in the pool. The caller owns the arrays. The function holds their buffers until it returns. */
static PyObject *read_frames(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Table table;
    Py_buffer buffers[4];
    if (want(given, 6) < 0)
        return NULL;
    const int64_t wide = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred() || open_table(args[4], &table, FRAMES_WORDS) < 0)
        return NULL;
    if (open_buffers(args, buffers, 4) < 0) {
        close_table(&table);
        return NULL;
    }
    Frames layout;
    memcpy(&layout, table.words, sizeof layout);
    const char *memory = (const char *)buffers[0].buf;
    const int32_t *positions = (const int32_t *)buffers[1].buf;
    const int64_t count = buffers[1].len / (int64_t)sizeof *positions;
    const int64_t space = buffers[0].len - layout.preamble_nbytes;
    const int64_t frames = space < 0 ? 0 : space / layout.segment_nbytes * layout.segment_frames;
    const int64_t size = layout.frame_nbytes, rows = wide > 0 ? count / wide : 0;
    const int64_t split = rows && size > 0 ? buffers[2].len / size / rows : 0;
    const int fit = rows * wide == count && split <= wide && buffers[2].len == rows * split * size &&
                    buffers[3].len == rows * (wide - split) * size &&
                    layout.segment_frames <= MOST_PER && (intptr_t)memory % WORD_NBYTES == 0;
    int64_t wrong = -1;
    for (int64_t i = 0; fit && wrong < 0 && i < count; i++)
        if (positions[i] < 0 || positions[i] >= frames)
            wrong = i;
    if (fit && wrong < 0) {
        const Outputs to = {(char *)buffers[2].buf, (char *)buffers[3].buf, wide, split, size};
        PyThreadState *others = count * size > (1 << 16) ? PyEval_SaveThread() : NULL;
        (layout.delta ? gather_delta : gather_plain)(&layout, memory, frames, positions, rows, &to);
        if (others)
            PyEval_RestoreThread(others);
    }
    if (wrong >= 0)
        wrong = positions[wrong], refuse_position(wrong, frames);
    release_buffers(buffers, 4);
    close_table(&table);
    if (PyErr_Occurred())
        return NULL;
    if (fit)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "frames and positions differ in number, or are misaligned");
    return NULL;
}
