/* Functions that find the ranks and positions of rows in their lanes. `_kernel.c` includes this
   file.

   `storage/trajectories/blocks/` describes the blocks, and implements the same in NumPy. The
   arrays may be maps of a damaged file. The code therefore checks every index against the length
   of its array, and raises IndexError if it is out of bounds. LaneBlocks keeps the table, and the
   arrays at its addresses, alive. The caller owns the buffers of a call. */

/* An array: its address, the size of an element in bytes, and the number of elements. Elements of
   8 bytes are signed, and smaller elements are unsigned. */
#define NUMBERS(WORD) WORD(address) WORD(itemsize) WORD(count)
typedef struct { NUMBERS(MEMBER) } Numbers;

#define TYPED(type, name) type name;
#define LADDER(OF)                                                                                 \
    OF(Numbers, rungs) OF(Numbers, marks) OF(Numbers, of_rungs) OF(Numbers, of_marks)
typedef struct { LADDER(TYPED) } Ladder;

/* The kinds of shelves. */
#define SHELVES(WORD) WORD(order) WORD(table) WORD(bits)
#define KIND(name) BY_##name,
enum { SHELVES(KIND) };

/* A shelf. Its kind determines the contents of `ahead` and `back`:

     order  ahead: the place of each offset              back: the offset of each place
     table  ahead: the offset of each lane, by sweep     back: the rank at each sweep, by lane
     bits   ahead: the bits of each layer                back: the words of each lane */
#define SHELF(OF)                                                                                  \
    OF(int64_t, kind) OF(int64_t, lanes) OF(int64_t, layers) OF(int64_t, nbytes)                   \
    OF(Ladder, starts) OF(Ladder, sweeps) OF(Numbers, ids) OF(Numbers, ahead) OF(Numbers, back)    \
    OF(Numbers, of_ahead) OF(Numbers, of_back) OF(Numbers, words)
typedef struct { SHELF(TYPED) } ShelfWords;

/* The first words of a table describe the blocks, of which the first `lost` ones are dropped, and
   the tail. The words of the shelves follow. */
#define INDEX(OF)                                                                                  \
    OF(int64_t, lost) OF(int64_t, tail_first) OF(int64_t, width) OF(int64_t, shelves)              \
    OF(Numbers, first) OF(Numbers, shelf) OF(Numbers, slot) OF(Numbers, of_lanes)                  \
    OF(Numbers, base) OF(Numbers, carried) OF(Numbers, carried_id) OF(Numbers, lane_first)         \
    OF(Numbers, tail_lane) OF(Numbers, tail_position) OF(Numbers, tail_start)                      \
    OF(Numbers, tail_ids) OF(Numbers, tail_base) OF(Numbers, tail_total) OF(Numbers, tail_places)
typedef struct { INDEX(TYPED) } Blocks;

enum {
    BLOCKS_WORDS = sizeof(Blocks) / sizeof(int64_t),
    SHELF_WORDS = sizeof(ShelfWords) / sizeof(int64_t),
    STEP = 64
};

typedef struct {
    const Blocks *blocks;
    const ShelfWords *shelves;
    int64_t tail_count;
} Index;

/* The stretch of a row: the position at which it began, its trajectory, and `stop`. The stretch
   ends at `stop`, unless it continues in the next block. */
typedef struct {
    int64_t start, id, stop;
} Piece;

#define NONE (-1) /* an index out of bounds or a damaged number; valid numbers are >= 0 */
#define TOO_LARGE 56 /* bits; larger numbers are damaged, and their sums might overflow */

static inline int64_t entry(const Numbers *of, int64_t i)
{
    if (i < 0 || i >= of->count)
        return NONE;
    const char *number_at = span(of->address, i * of->itemsize, of->itemsize);
    switch (of->itemsize) {
    case 1: return *(const uint8_t *)number_at;
    case 2: return *(const uint16_t *)number_at;
    case 4: return *(const uint32_t *)number_at;
    default: {
        uint64_t number = *(const uint64_t *)number_at;
        return number >> TOO_LARGE ? NONE : (int64_t)number;
    }
    }
}

/* Return for each byte the number of bits that are set in it. */
static inline uint64_t ones_of_bytes(uint64_t word)
{
    word -= (word >> 1) & 0x5555555555555555u;
    word = (word & 0x3333333333333333u) + ((word >> 2) & 0x3333333333333333u);
    return (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu;
}

/* Return for each byte the number of bits that are set in it and in the bytes below it. */
static inline uint64_t ones_up_to(uint64_t word)
{
    return ones_of_bytes(word) * 0x0101010101010101u;
}

static inline int ones(uint64_t word)
{
    return (int)(ones_up_to(word) >> 56);
}

static inline int64_t signed_entry(const Numbers *of, int64_t i)
{
    return i < 0 || i >= of->count ? NONE : *(const int64_t *)span(of->address, i * 8, 8);
}

static inline uint64_t low_bits(int64_t bits)
{
    return bits <= 0 ? 0 : bits >= STEP ? ~(uint64_t)0 : ((uint64_t)1 << bits) - 1;
}

/* Return the index of the lowest set bit of a word that is not 0. */
static inline int64_t lowest_bit(uint64_t word)
{
    return ones((word & (0 - word)) - 1);
}

/* Return the index of the set bit that has `rank` other set bits below it. */
static inline int64_t nth_bit(uint64_t word, int64_t rank)
{
    if (rank < STEP && !(~word & low_bits(rank + 1))) /* no gap below the bit, as in most layers */
        return rank;
    const uint64_t sums = ones_up_to(word);
    int64_t bit = 0;
    while (bit < STEP - 8 && (int64_t)((sums >> bit) & 0xff) <= rank)
        bit += 8;
    rank -= bit ? (int64_t)((sums >> (bit - 8)) & 0xff) : 0;
    for (word >>= bit; rank > 0; rank--)
        word &= word - 1;
    for (; !(word & 1) && bit < STEP - 1; word >>= 1)
        bit++;
    return bit;
}

/* Return the index after the last rung of a ladder that is at most x, or NONE if the ladder is
   damaged. */
static int64_t up_to(const Ladder *ladder, int64_t which, int64_t x)
{
    int64_t first = entry(&ladder->of_rungs, which), mark = entry(&ladder->of_marks, which);
    if (first < 0 || mark < 0 || x < 0)
        return NONE;
    int64_t low = entry(&ladder->marks, mark + x / STEP);
    int64_t high = entry(&ladder->marks, mark + x / STEP + 1);
    if (low < 0 || high < low || first + high > ladder->rungs.count)
        return NONE;
    for (low += first, high += first; low < high;) {
        int64_t middle = (low + high) / 2;
        if (entry(&ladder->rungs, middle) <= x)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Find the last number that is at most x among `count` ascending numbers from index `first` on.
   Return its index relative to `first`. The first number is assumed to be at most x. */
static int64_t last_up_to(const Numbers *of, int64_t first, int64_t count, int64_t x)
{
    int64_t low = 0, high = count - 1;
    if (first < 0 || count < 1 || first + count > of->count)
        return NONE;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (entry(of, first + middle) <= x)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Return the bits of 64 lanes in a layer, starting with lane 64 * word. The caller has checked the
   layer. */
static inline uint64_t layer_word(const ShelfWords *shelf, int64_t layer, int64_t word)
{
    uint64_t found = 0;
    int64_t begin = word * 8, size = shelf->nbytes - begin;
    const char *from = span(shelf->ahead.address, layer * shelf->nbytes + begin, size < 8 ? size : 8);
    if (size >= 8)
        memcpy(&found, from, 8);  /* the size is constant, so the compiler emits one load */
    else
        memcpy(&found, from, (size_t)size);
    return found;
}

static int has_layers(const ShelfWords *shelf, int64_t sweep)
{
    return sweep >= 0 && shelf->layers > 0 && shelf->nbytes > 0 &&
           (sweep + 1) * shelf->layers * shelf->nbytes <= shelf->ahead.count;
}

/* Return the index of the first word of a lane, and set `count` to the number of its words. */
static int64_t lane_words(const ShelfWords *shelf, int64_t slot, int64_t lane, int64_t *count)
{
    int64_t begin = entry(&shelf->of_back, slot);
    *count = entry(&shelf->words, slot);
    if (begin < 0 || *count < 1 || lane < 0 || lane >= shelf->lanes)
        return NONE;
    begin += lane * *count;
    return begin + *count <= shelf->back.count ? begin : NONE;
}

static inline uint64_t lane_word(const ShelfWords *shelf, int64_t at_word)
{
    return *(const uint64_t *)span(shelf->back.address, at_word * 8, 8);
}

/* Return the number of bits that are set in `count` words of lanes. */
static int64_t ones_in(const ShelfWords *shelf, int64_t at_word, int64_t count)
{
    int64_t found = 0;
    while (count > 0) {
        /* The sum of each byte is at most 8 * 31, and the sum of a pair of bytes twice that. */
        int64_t some = count < 31 ? count : 31;
        const uint64_t *words = (const uint64_t *)span(shelf->back.address, at_word * 8, some * 8);
        uint64_t bytes = 0;
        for (int64_t k = 0; k < some; k++)
            bytes += ones_of_bytes(words[k]);
        bytes = (bytes & 0x00ff00ff00ff00ffu) + ((bytes >> 8) & 0x00ff00ff00ff00ffu);
        found += (int64_t)((bytes * 0x0001000100010001u) >> 48);
        at_word += some;
        count -= some;
    }
    return found;
}

/* Return the number of sweeps of a block, and set `first` to the index of its first sweep. */
static int64_t sweeps_of(const ShelfWords *shelf, int64_t slot, int64_t *first)
{
    const Numbers *of = &shelf->sweeps.of_rungs;
    *first = entry(of, slot);
    return *first < 0 ? NONE
                      : (slot + 1 < of->count ? entry(of, slot + 1) : shelf->sweeps.rungs.count) -
                            *first;
}

/* Find the lane and the rank of the row at an offset of a block, and on a shelf of bits its bit in
   the words of the lane, or else NONE. Return 0, or -1 if the block is damaged. */
static int spot_of(const Index *index, int64_t block, int64_t offset, int64_t *lane, int64_t *rank,
                   int64_t *bit_of_lane)
{
    *bit_of_lane = NONE;
    const Blocks *blocks = index->blocks;
    int64_t which = entry(&blocks->shelf, block), slot = entry(&blocks->slot, block);
    if (which < 0 || which >= blocks->shelves || slot < 0)
        return -1;
    const ShelfWords *shelf = index->shelves + which;
    if (shelf->kind == BY_order) {
        int64_t place = entry(&shelf->ahead, entry(&shelf->of_ahead, slot) + offset);
        int64_t first = entry(&blocks->of_lanes, block);
        int64_t stop = block + 1 < blocks->of_lanes.count ? entry(&blocks->of_lanes, block + 1)
                                                          : blocks->base.count;
        *lane = last_up_to(&blocks->lane_first, first, stop - first, place);
        *rank = place - entry(&blocks->lane_first, first + *lane);
        return *lane < 0 ? -1 : 0;
    }
    int64_t sweep = up_to(&shelf->sweeps, slot, offset) - 1, first, sweeps;
    sweeps = sweeps_of(shelf, slot, &first);
    if (sweep < first || first < 0)
        return -1;
    if (shelf->kind == BY_table) {
        *lane = last_up_to(&shelf->ahead, sweep * shelf->lanes, shelf->lanes, offset);
        int64_t before = entry(&shelf->back, first * shelf->lanes + *lane * sweeps + sweep - first);
        *rank = before + offset - entry(&shelf->ahead, sweep * shelf->lanes + *lane);
        return *lane < 0 || before < 0 ? -1 : 0;
    }
    if (!has_layers(shelf, sweep))
        return -1;
    int64_t left = offset - entry(&shelf->sweeps.rungs, sweep), layer = sweep * shelf->layers;
    int64_t word = 0, words = (shelf->nbytes + 7) / 8;
    for (;; word++) {
        int64_t count = 0;
        if (word == words)
            return -1;
        for (int64_t j = 0; j < shelf->layers; j++)
            count += ones(layer_word(shelf, layer + j, word));
        if (left < count)
            break;
        left -= count;
    }
    int64_t bit = 0, gone = 0;
    if (shelf->layers == 1)
        gone = left, bit = nth_bit(layer_word(shelf, layer, word), left);
    else for (int width = STEP / 2; width; width /= 2) {
        int64_t count = 0;
        for (int64_t j = 0; j < shelf->layers; j++)
            count += ones(layer_word(shelf, layer + j, word) & low_bits(bit + width));
        if (left >= count) {
            gone = count;
            bit += width;
        }
    }
    *lane = word * STEP + bit;
    *bit_of_lane = layer = (sweep - first) * shelf->layers + left - gone;
    int64_t count, begin = lane_words(shelf, slot, *lane, &count);
    if (begin < 0)
        return -1;
    int64_t whole = layer / STEP < count ? layer / STEP : count;
    *rank = ones_in(shelf, begin, whole);
    if (whole < count)
        *rank += ones(lane_word(shelf, begin + whole) & low_bits(layer - whole * STEP));
    return 0;
}

/* Return the number of rows of a lane before a block. The block after the last one is the tail. */
static inline int64_t base_of(const Blocks *blocks, int64_t block, int64_t lane)
{
    const Numbers *of = &blocks->of_lanes;
    if (block >= of->count)
        return entry(&blocks->tail_base, lane);
    int64_t begin = entry(of, block);
    int64_t stop = block + 1 < of->count ? entry(of, block + 1) : blocks->base.count;
    return begin + lane < stop ? entry(&blocks->base, begin + lane) : 0;
}

static int64_t block_of_row(const Blocks *blocks, int64_t row)
{
    int64_t lost = blocks->lost;
    return lost + last_up_to(&blocks->first, lost, blocks->first.count - lost, row);
}

/* Return the block that contains a position of a lane. The position must be before the tail. The
   search starts at block `near`. */
static int64_t block_of(const Blocks *blocks, int64_t lane, int64_t position, int64_t near)
{
    int64_t last = blocks->first.count - 1, low = near, high = near, step;
    for (step = 1; low > blocks->lost && base_of(blocks, low, lane) > position; step *= 2) {
        high = low;
        low = low - step < blocks->lost ? blocks->lost : low - step;
    }
    for (step = 1; high < last && base_of(blocks, high + 1, lane) <= position; step *= 2) {
        low = high + 1;
        high = low + step > last ? last : low + step;
    }
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (base_of(blocks, middle, lane) <= position)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Return the position at which the stretch of a row began. The row is the one with rank `rank`
   among the rows of a lane in a block. */
static int64_t start_of(const Index *index, int64_t block, int64_t lane, int64_t rank)
{
    const Blocks *blocks = index->blocks;
    int64_t which = entry(&blocks->shelf, block), slot = entry(&blocks->slot, block);
    int64_t lanes = entry(&blocks->of_lanes, block);
    if (which < 0 || which >= blocks->shelves || slot < 0 || lanes < 0)
        return NONE;
    const Ladder *starts = &index->shelves[which].starts;
    int64_t first = entry(&blocks->lane_first, lanes + lane);
    int64_t begun = up_to(starts, slot, first + rank) - 1;
    if (first < 0 || begun < NONE)
        return NONE;
    if (begun >= entry(&starts->of_rungs, slot) && entry(&starts->rungs, begun) >= first)
        return entry(&blocks->base, lanes + lane) + entry(&starts->rungs, begun) - first;
    return entry(&blocks->carried, lanes + lane);
}

/* Find the lane, the position and, unless `start` is NULL, the start of a row. For `bit` see
   `spot_of`. Return the block, or -1 if the index does not contain the row or is damaged. */
static int64_t find_row(const Index *index, int64_t row, int64_t *lane, int64_t *position,
                    int64_t *start, int64_t *bit)
{
    const Blocks *blocks = index->blocks;
    int64_t rank, block, offset = row - blocks->tail_first;
    if (offset >= 0) {
        if (offset >= index->tail_count)
            return -1;
        *lane = entry(&blocks->tail_lane, offset);
        *position = entry(&blocks->tail_position, offset);
        *bit = NONE;
        if (start)
            *start = entry(&blocks->tail_start, offset);
        return blocks->first.count;
    }
    block = block_of_row(blocks, row);
    if (block < blocks->lost || (offset = row - entry(&blocks->first, block)) < 0 ||
        spot_of(index, block, offset, lane, &rank, bit) < 0)
        return -1;
    *position = base_of(blocks, block, *lane) + rank;
    if (!start)
        return block;
    *start = start_of(index, block, *lane, rank);
    return *start < 0 ? -1 : block;
}

/* Write `count` rows of a lane in a block, from rank `rank` on, to every `stride`-th element of
   `row`. `bit` is the bit of the row before them (see `spot_of`), or NONE. Return 0, or -1 if the
   block is damaged. */
static int rows_in_block(const Index *index, int64_t block, int64_t lane, int64_t rank,
                         int64_t count, int64_t bit, int64_t *row, int64_t stride)
{
    const Blocks *blocks = index->blocks;
    int64_t which = entry(&blocks->shelf, block), slot = entry(&blocks->slot, block);
    int64_t row_first = entry(&blocks->first, block), done = 0, first, sweeps;
    int64_t rows = (block + 1 < blocks->first.count ? entry(&blocks->first, block + 1)
                                                    : blocks->tail_first) - row_first;
    if (which < 0 || which >= blocks->shelves || slot < 0 || row_first < 0 || rank < 0)
        return -1;
    const ShelfWords *shelf = index->shelves + which;
    if (shelf->kind == BY_order) {
        int64_t place = entry(&blocks->lane_first, entry(&blocks->of_lanes, block) + lane) + rank;
        int64_t begin = entry(&shelf->of_back, slot);
        for (; begin >= 0 && place >= rank && done < count; done++) {
            int64_t offset = entry(&shelf->back, begin + place + done);
            if (offset < 0 || offset >= rows)
                return -1;
            row[done * stride] = row_first + offset;
        }
        return done == count ? 0 : -1;
    }
    sweeps = sweeps_of(shelf, slot, &first);
    if (first < 0)
        return -1;
    if (shelf->kind == BY_table) {
        int64_t ranks = first * shelf->lanes + lane * sweeps;
        int64_t sweep = last_up_to(&shelf->back, ranks, sweeps, rank);
        for (; sweep >= 0 && sweep < sweeps && done < count; sweep++) {
            int64_t begin = entry(&shelf->ahead, (first + sweep) * shelf->lanes + lane);
            int64_t before = entry(&shelf->back, ranks + sweep);
            int64_t stop = sweep + 1 < sweeps ? entry(&shelf->back, ranks + sweep + 1) : INT64_MAX;
            if (begin < 0 || before < 0)
                return -1;
            for (; done < count && rank + done < stop; done++) {
                int64_t offset = begin + rank + done - before;
                if (offset < 0 || offset >= rows)
                    return -1;
                row[done * stride] = row_first + offset;
            }
        }
        return done == count ? 0 : -1;
    }
    int64_t words, begin = lane_words(shelf, slot, lane, &words);
    for (int64_t k = bit < 0 ? 0 : bit / STEP; begin >= 0 && k < words && done < count; k++) {
        uint64_t word = lane_word(shelf, begin + k);
        if (bit >= 0) {
            if (k == bit / STEP)
                word &= ~low_bits(bit % STEP + 1);
        } else {
            int64_t held = ones(word);
            if (rank >= held) {
                rank -= held;
                continue;
            }
            for (; rank > 0; rank--)
                word &= word - 1;
        }
        for (; word && done < count; word &= word - 1, done++) {
            int64_t layer = k * STEP + lowest_bit(word), beside = 0, sweep = first + layer;
            if (shelf->layers > 1) {  /* usually there is one layer, and division is slow */
                sweep = first + layer / shelf->layers;
                beside = layer % shelf->layers;
            }
            int64_t offset = entry(&shelf->sweeps.rungs, sweep);
            if (!has_layers(shelf, sweep) || offset < 0)
                return -1;
            offset += beside;
            for (int64_t j = 0; j < shelf->layers; j++)
                for (int64_t w = 0; w * STEP <= lane; w++)
                    offset += ones(layer_word(shelf, sweep * shelf->layers + j, w) &
                                   low_bits(lane - w * STEP));
            if (offset >= rows)
                return -1;
            row[done * stride] = row_first + offset;
        }
    }
    return done == count ? 0 : -1;
}

/* Write the rows at `count` positions of a lane, from `position` on, to every `stride`-th element
   of `row`. The search starts at block `block`, in which the row before them has the bit `bit` (see
   `spot_of`), or NONE. Return 0, or -1 if the index is damaged. */
static int rows_from(const Index *index, int64_t lane, int64_t position, int64_t count,
                     int64_t block, int64_t bit, int64_t *row, int64_t stride)
{
    const Blocks *blocks = index->blocks;
    const int64_t before = block;
    int64_t base = entry(&blocks->tail_base, lane), last = blocks->first.count - 1;
    if (base < 0 || position < 0)
        return -1;
    for (; count > 0 && position < base; block++) {
        if (block > last)
            block = last;
        block = block_of(blocks, lane, position, block);
        int64_t rank = position - base_of(blocks, block, lane);
        int64_t here = base_of(blocks, block + 1, lane) - position;
        if (here > count)
            here = count;
        if (block != before)
            bit = NONE;
        if (here < 1 || rows_in_block(index, block, lane, rank, here, bit, row, stride) < 0)
            return -1;
        row += here * stride;
        position += here;
        count -= here;
    }
    for (; count > 0; count--, position++, row += stride) {
        int64_t place = entry(&blocks->tail_places, lane * blocks->width + position - base);
        if (position - base >= blocks->width || place < 0 || place >= index->tail_count)
            return -1;
        *row = blocks->tail_first + place;
    }
    return 0;
}

/* Find the stretch of the row at a position of a lane. Return 0, or -1 if there is no such row or
   the index is damaged. */
static int stretch_at(const Index *index, int64_t lane, int64_t position, int64_t near,
                      Piece *found)
{
    const Blocks *blocks = index->blocks;
    int64_t base = entry(&blocks->tail_base, lane), last = blocks->first.count - 1;
    int64_t total = entry(&blocks->tail_total, lane);
    if (base < 0 || position < 0 || position >= total)
        return -1;
    if (position >= base) {
        int64_t row = lane * blocks->width - base, low = position, high = total - 1;
        int64_t place = entry(&blocks->tail_places, row + position);
        if (total - base > blocks->width || place < 0 || place >= index->tail_count)
            return -1;
        found->start = entry(&blocks->tail_start, place);
        found->id = signed_entry(&blocks->tail_ids, place);
        while (low < high) {
            int64_t middle = (low + high + 1) / 2;
            if (entry(&blocks->tail_start, entry(&blocks->tail_places, row + middle)) <= position)
                low = middle;
            else
                high = middle - 1;
        }
        found->stop = low + 1;
        return 0;
    }
    int64_t block = block_of(blocks, lane, position, near > last ? last : near);
    int64_t which = entry(&blocks->shelf, block), slot = entry(&blocks->slot, block);
    int64_t lanes = entry(&blocks->of_lanes, block), rank = position - base_of(blocks, block, lane);
    if (which < 0 || which >= blocks->shelves || slot < 0 || lanes < 0 || rank < 0)
        return -1;
    const ShelfWords *shelf = index->shelves + which;
    const Ladder *starts = &shelf->starts;
    int64_t first = entry(&blocks->lane_first, lanes + lane), none = entry(&starts->of_rungs, slot);
    int64_t next = up_to(starts, slot, first + rank), stop = base_of(blocks, block + 1, lane);
    if (first < 0 || next < 0 || none < 0)
        return -1;
    int64_t begun = next > none ? entry(&starts->rungs, next - 1) : NONE;
    if (begun >= first) {
        found->start = position - rank + begun - first;
        found->id = signed_entry(&shelf->ids, next - 1);
    } else {
        found->start = entry(&blocks->carried, lanes + lane);
        found->id = signed_entry(&blocks->carried_id, lanes + lane);
    }
    int64_t end = slot + 1 < starts->of_rungs.count ? entry(&starts->of_rungs, slot + 1)
                                                    : starts->rungs.count;
    int64_t after = next < end ? position - rank + entry(&starts->rungs, next) - first : stop;
    found->stop = after < stop ? after : stop;
    return found->start < 0 || found->start > position || found->stop <= position ||
           found->stop > total ? -1 : 0;
}

/* Open a writable array of at least `least` numbers. The caller must release it. */
static int open_room(PyObject *object, Table *room, Py_ssize_t least)
{
    if (PyObject_GetBuffer(object, &room->buffer, PyBUF_WRITABLE) < 0)
        return -1;
    if (room->buffer.len >= least * (Py_ssize_t)sizeof(int64_t))
        return 0;
    PyBuffer_Release(&room->buffer);
    PyErr_SetString(PyExc_ValueError, "an array is too short");
    return -1;
}

static int open_index(PyObject *object, Table *table, Index *index)
{
    if (open_table(object, table, BLOCKS_WORDS) < 0)
        return -1;
    index->blocks = (const Blocks *)table->words;
    index->shelves = (const ShelfWords *)(table->words + BLOCKS_WORDS);
    if (table->count >= BLOCKS_WORDS + index->blocks->shelves * SHELF_WORDS)
        return 0;
    close_table(table);
    PyErr_SetString(PyExc_ValueError, "a table is too short");
    return -1;
}

/* The arrays of a call: the table of blocks, the row numbers, and the output array. */
typedef struct {
    Table table, rows, found;
    Index index;
} Asked;

static void close_asked(Asked *asked)
{
    PyBuffer_Release(&asked->found.buffer);
    close_table(&asked->rows);
    close_table(&asked->table);
}

/* Open the arrays of a call. The output array must have room for `each` numbers per row. The
   caller must close the arrays unless the function returns -1. */
static int open_asked(PyObject *table, PyObject *tail_count, PyObject *rows, PyObject *found,
                      int64_t each, Asked *asked)
{
    asked->index.tail_count = PyLong_AsLongLong(tail_count);
    if (PyErr_Occurred() || open_index(table, &asked->table, &asked->index) < 0)
        return -1;
    if (open_table(rows, &asked->rows, 0) == 0) {
        if (open_room(found, &asked->found, asked->rows.count * each) == 0)
            return 0;
        close_table(&asked->rows);
    }
    close_table(&asked->table);
    return -1;
}

static PyObject *no_row(int64_t row)
{
    return PyErr_Format(PyExc_IndexError, "row %lld is not in the index", row);
}

/* spots_of(table, tail_count, rows, found): see `LaneKernel`. */
static PyObject *spots_of(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Asked asked;
    int64_t bit;
    (void)self;
    if (want(count, 4) < 0 || open_asked(args[0], args[1], args[2], args[3], 3, &asked) < 0)
        return NULL;
    int64_t *lane = (int64_t *)asked.found.buffer.buf;
    Py_ssize_t n = asked.rows.count, i = 0;
    while (i < n && find_row(&asked.index, asked.rows.words[i], lane + i, lane + n + i,
                             lane + 2 * n + i, &bit) >= 0)
        i++;
    PyObject *result = i < n ? no_row(asked.rows.words[i]) : Py_NewRef(Py_None);
    close_asked(&asked);
    return result;
}

/* windows_of(table, tail_count, rows, length, first, found): see `LaneKernel`. */
static PyObject *windows_of(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Asked asked;
    PyObject *result = NULL;
    int64_t length, first_row, done = 0;
    (void)self;
    if (want(count, 6) < 0 || (length = PyLong_AsLongLong(args[3]), PyErr_Occurred()) ||
        (first_row = PyLong_AsLongLong(args[4]), PyErr_Occurred()) ||
        open_asked(args[0], args[1], args[2], args[5], 0, &asked) < 0)
        return NULL;
    const Blocks *blocks = asked.index.blocks;
    int64_t *found = (int64_t *)asked.found.buffer.buf;
    int64_t most = length < 1 ? 0 : asked.found.buffer.len / (Py_ssize_t)sizeof(int64_t) / length;
    for (Py_ssize_t i = 0; i < asked.rows.count && done < most; i++) {
        int64_t lane, position, start, bit, *row = found + done * length;
        int64_t block =
            find_row(&asked.index, asked.rows.words[i], &lane, &position, &start, &bit);
        if (block < 0) {
            no_row(asked.rows.words[i]);
            goto all;
        }
        int64_t begin = position - length + 1, floor = base_of(blocks, blocks->lost, lane);
        if (begin < start || begin < floor)
            continue;
        if (rows_from(&asked.index, lane, begin, length, block, NONE, row, 1) < 0) {
            no_row(asked.rows.words[i]);
            goto all;
        }
        done += row[0] >= first_row;
    }
    result = PyLong_FromLongLong(done);
all:
    close_asked(&asked);
    return result;
}

/* rows_at(table, tail_count, spots, near, length, found): see `LaneKernel`. */
static PyObject *rows_at(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Table table, spots, near, found;
    Index index;
    PyObject *result = NULL;
    int64_t length;
    (void)self;
    if (want(count, 6) < 0 || (index.tail_count = PyLong_AsLongLong(args[1]), PyErr_Occurred()) ||
        (length = PyLong_AsLongLong(args[4]), PyErr_Occurred()) ||
        open_index(args[0], &table, &index) < 0)
        return NULL;
    if (open_table(args[3], &near, 0) < 0)
        goto opened;
    if (open_table(args[2], &spots, 3 * near.count) < 0)
        goto two;
    if (open_room(args[5], &found, near.count * length) < 0)
        goto three;
    int64_t *row = (int64_t *)found.buffer.buf;
    for (Py_ssize_t i = 0; i < near.count; i++) {
        int64_t block = near.words[i] >= index.blocks->tail_first
                            ? index.blocks->first.count - 1
                            : block_of_row(index.blocks, near.words[i]);
        int64_t lane = spots.words[i], position = spots.words[near.count + i] - length + 1;
        int64_t more = spots.words[2 * near.count + i] - position; /* before the lowest position */
        int64_t *first = row + i * length;
        more = more < 0 ? 0 : more > length - 1 ? length - 1 : more;
        if (length > 0 &&
            rows_from(&index, lane, position + more, length - more, block, NONE, first + more, 1) <
                0) {
            PyErr_Format(PyExc_IndexError, "lane %lld has no row %lld in the index", lane,
                         position + length - 1);
            goto all;
        }
        for (int64_t k = 0; k < more; k++)
            first[k] = first[more];
    }
    result = Py_NewRef(Py_None);
all:
    PyBuffer_Release(&found.buffer);
three:
    close_table(&spots);
two:
    close_table(&near);
opened:
    close_table(&table);
    return result;
}

/* walk_onward(table, tail_count, rows, length, found): see `LaneKernel`. */
static PyObject *walk_onward(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Asked asked;
    PyObject *result = NULL;
    int64_t length;
    (void)self;
    if (want(count, 5) < 0 || (length = PyLong_AsLongLong(args[3]), PyErr_Occurred()) ||
        open_asked(args[0], args[1], args[2], args[4], length, &asked) < 0)
        return NULL;
    const Index *index = &asked.index;
    const int64_t *rows = asked.rows.words;
    Py_ssize_t n = asked.rows.count;
    int64_t *row = (int64_t *)asked.found.buffer.buf;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t lane, position, block, bit, steps = 1;
        Piece piece;
        if ((block = find_row(index, rows[i], &lane, &position, NULL, &bit)) < 0)
            goto damaged;
        if (length > 1) {
            int64_t total = entry(&index->blocks->tail_total, lane), stop = position + length;
            if (stop > total)
                stop = total;
            if (stretch_at(index, lane, position, block, &piece) < 0)
                goto damaged;
            int64_t began = piece.start, until = piece.stop;
            while (until < stop) { /* the stretch may continue in the next block */
                if (stretch_at(index, lane, until, block + 1, &piece) < 0)
                    goto damaged;
                if (piece.start != began)
                    break;
                until = piece.stop;
            }
            steps = (until < stop ? until : stop) - position;
        }
        if (length < 1)
            continue;
        row[i] = rows[i];
        if (rows_from(index, lane, position + 1, steps - 1, block, bit, row + n + i, n) < 0)
            goto damaged;
        for (int64_t k = steps; k < length; k++)
            row[k * n + i] = row[(steps - 1) * n + i];
        continue;
    damaged:
        no_row(rows[i]);
        goto all;
    }
    result = Py_NewRef(Py_None);
all:
    close_asked(&asked);
    return result;
}

/* bounds_of(table, tail_count, lane, position, floor): see `LaneKernel`. */
static PyObject *bounds_of(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Table table;
    Index index;
    Piece all, next;
    int64_t given[4];
    (void)self;
    if (want(count, 5) < 0)
        return NULL;
    for (int i = 0; i < 4; i++)
        if ((given[i] = PyLong_AsLongLong(args[i + 1])) == -1 && PyErr_Occurred())
            return NULL;
    if (open_index(args[0], &table, &index) < 0)
        return NULL;
    index.tail_count = given[0];
    int64_t lane = given[1], floor = given[3];
    int64_t total = entry(&index.blocks->tail_total, lane);
    int damaged = stretch_at(&index, lane, given[2], INT64_MAX, &all) < 0;
    while (!damaged && all.start > floor &&
           !(damaged = stretch_at(&index, lane, all.start - 1, INT64_MAX, &next) < 0) && next.id == all.id)
        all.start = next.start;
    while (!damaged && all.stop < total &&
           !(damaged = stretch_at(&index, lane, all.stop, INT64_MAX, &next) < 0) && next.id == all.id)
        all.stop = next.stop;
    close_table(&table);
    if (damaged) {
        PyErr_Format(PyExc_IndexError, "lane %lld has no row %lld in the index", lane, given[2]);
        return NULL;
    }
    return Py_BuildValue("LL", (long long)(all.start < floor ? floor : all.start),
                         (long long)all.stop);
}
