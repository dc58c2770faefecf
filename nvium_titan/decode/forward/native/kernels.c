// The decode step on the CPU, at the speed of the memory: whole blocks, junctions, the head.
//
// A decode step reads every weight once and does little with it, so its time is that of the read,
// as long as a piggyback group of a few rows costs no more than one row. Weights therefore lie in
// panels of 16 outputs, in the order in which they are read, and a panel goes through all rows of
// the group while it is in the cache. One call runs all layers of a block.
//
// One row's result is a fixed sequence of operations: sums run over the inputs in order, whatever
// the other rows are. So the result of a row is the same to the bit in any group, any batch and
// any number of threads, and piggybacked decoding equals a full forward pass to the bit.
//
// Weights are float32, bfloat16, or int8 with a scale per output; activations, sums and the KV
// cache are float32. For int8 an activation row is rounded to integers by its own scale, and sums
// are exact int32: as many bits as cannot overflow, 12 at an input width of 4096, 15 at most.
//
// Shapes in comments: R rows, I inputs, O outputs, G key/value heads, H head width, S slots.

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

enum { PANEL = 16, HALF = 8, PANELS = 4, STRIP = PANELS * PANEL, MAX_ROWS = 128 };
enum { TILE = 6, FEW_ROWS = 16, STRIP_INNER = 64, PANEL_INNER = 256, AHEAD = 2048 };
enum { FLOAT32, BFLOAT16, INT8 };

typedef float floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(32), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

// A matrix (O, I) in panels; see forward.py for the three packings.
typedef struct {
    const void *weights;
    const float *scales;  // (O,), int8 only
    const float *bias;    // (O,) or null
    int32_t inputs, outputs;
    float levels;  // int8: largest activation integer
} Linear;

typedef struct {
    const float *attn_norm, *mlp_norm;  // (D,)
    Linear qkv, attn_out, gate, up, down;
} Layer;

typedef struct {
    int32_t kind, width, heads, kv_heads, head_dim, ffn;
    float eps, scale;    // scale of the attention scores
    const float *rope;   // (S, H): cosines of the pairs, then sines
} Dims;

// Rows first .. first + rows - 1 of one sequence.
typedef struct {
    float *kv;            // (layers of the block, 2G, S, H): keys, then values
    const float *input;   // (S, D): boundary states before the block
    float *output;        // (S, D): and behind it
    int64_t slots;
    int32_t first, rows;
} Group;

// ---- products ------------------------------------------------------------------------------

// The sums of `panels` panels for `rows` rows over inputs [from, to), added to sum (R, STRIP).
//
// `kind`, `panels` and `rows` are constants, so that the sums stay in registers.
INLINE void add_tile(int kind, int panels, int rows, const void *act, long stride,
                     const char *weights, long panel_bytes, int from, int to, float *sum) {
    // For int8 these are the bits of exact integers.
    floats low[PANELS][TILE], high[PANELS][TILE];
    for (int p = 0; p < panels; p++)
        for (int r = 0; r < rows; r++) {
            low[p][r] = *(const floats *)(sum + r * STRIP + p * PANEL);
            high[p][r] = *(const floats *)(sum + r * STRIP + p * PANEL + HALF);
        }
    for (int i = from / 2; kind == INT8 && i < (to + 1) / 2; i++)
        for (int p = 0; p < panels; p++) {
            const int8_t *w = (const int8_t *)weights + p * panel_bytes + i * 2L * PANEL;
            if (panels == 1) __builtin_prefetch(w + AHEAD);
#ifdef __AVX2__
            __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
            __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + PANEL)));
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, (const int16_t *)act + r * stride + 2 * i, 4);
                __m256i a = _mm256_set1_epi32(pair);
                low[p][r] = (floats)((ints)low[p][r] + (ints)_mm256_madd_epi16(a, w0));
                high[p][r] = (floats)((ints)high[p][r] + (ints)_mm256_madd_epi16(a, w1));
            }
#else
            for (int r = 0; r < rows; r++) {
                const int16_t *a = (const int16_t *)act + r * stride + 2 * i;
                ints exact_low = (ints)low[p][r], exact_high = (ints)high[p][r];
                for (int o = 0; o < HALF; o++) {
                    exact_low[o] += a[0] * w[2 * o] + a[1] * w[2 * o + 1];
                    exact_high[o] += a[0] * w[PANEL + 2 * o] + a[1] * w[PANEL + 2 * o + 1];
                }
                low[p][r] = (floats)exact_low;
                high[p][r] = (floats)exact_high;
            }
#endif
        }
    for (int i = from; kind != INT8 && i < to; i++)
        for (int p = 0; p < panels; p++) {
            const char *w = weights + p * panel_bytes + (long)i * PANEL * (kind == FLOAT32 ? 4 : 2);
            if (panels == 1) __builtin_prefetch(w + AHEAD);
            floats w0, w1;
            if (kind == BFLOAT16) {
                words pairs = *(const words *)w;
                w0 = (floats)(pairs << 16);
                w1 = (floats)(pairs & 0xffff0000u);
            } else {
                w0 = *(const floats *)w;
                w1 = *(const floats *)(w + 4 * HALF);
            }
            for (int r = 0; r < rows; r++) {
                float a = ((const float *)act)[r * stride + i];
                low[p][r] += a * w0;
                high[p][r] += a * w1;
            }
        }
    for (int p = 0; p < panels; p++)
        for (int r = 0; r < rows; r++) {
            *(floats *)(sum + r * STRIP + p * PANEL) = low[p][r];
            *(floats *)(sum + r * STRIP + p * PANEL + HALF) = high[p][r];
        }
}

// Rows made ready for products: float32 rows, or int16 rows with their scales.
typedef struct {
    void *rows;       // (R, stride)
    long stride;      // elements from row to row
    float *scales;    // (R,), int8 only
} Operand;

static long element_size(int kind) { return kind == INT8 ? 1 : kind == BFLOAT16 ? 2 : 4; }

// Add inputs [from, to) of one panel to the sums of rows [first, rows).
INLINE void add_panel(int kind, const Operand *x, int first, int rows, const char *weights,
                      int from, int to, float *sum) {
    for (int r = first; r < rows; r += TILE) {
        const char *act = (const char *)x->rows + r * x->stride * (kind == INT8 ? 2 : 4);
        float *s = sum + r * STRIP;
#define ADD(count) add_tile(kind, 1, count, act, x->stride, weights, 0, from, to, s)
        switch (rows - r) {
            case 1: ADD(1); break;
            case 2: ADD(2); break;
            case 3: ADD(3); break;
            case 4: ADD(4); break;
            case 5: ADD(5); break;
            default: ADD(TILE);
        }
#undef ADD
    }
}

// sum (R, STRIP) = sums of some panels.
//
// Four streams of memory are read faster than one, but the sums of four panels fit into registers
// for two rows only. So with few rows one or two read a piece of a strip, and the others follow
// while it is in the cache; that is worth it for float32, where there is more to read than to do.
INLINE void add_strip(int kind, const Operand *x, int rows, const char *weights, long panel_bytes,
                      int panels, int inputs, float *sum) {
    memset(sum, 0, sizeof(float) * STRIP * rows);
    if (panels < PANELS || rows > (kind == FLOAT32 ? FEW_ROWS : 2)) {
        for (int p = 0; p < panels; p++)
            for (int from = 0; from < inputs; from += PANEL_INNER) {
                int to = from + PANEL_INNER < inputs ? from + PANEL_INNER : inputs;
                add_panel(kind, x, 0, rows, weights + p * panel_bytes, from, to, sum + p * PANEL);
            }
        return;
    }
    const int first = rows % TILE == 2 ? 2 : 1, inner = first < rows ? STRIP_INNER : inputs;
    for (int from = 0; from < inputs; from += inner) {
        int to = from + inner < inputs ? from + inner : inputs;
        if (first == 1)
            add_tile(kind, PANELS, 1, x->rows, x->stride, weights, panel_bytes, from, to, sum);
        else
            add_tile(kind, PANELS, 2, x->rows, x->stride, weights, panel_bytes, from, to, sum);
        for (int p = 0; p < PANELS; p++)
            add_panel(kind, x, first, rows, weights + p * panel_bytes, from, to, sum + p * PANEL);
    }
}

static int num_panels(const Linear *linear) { return (linear->outputs + PANEL - 1) / PANEL; }

// Compute the outputs of a linear layer from panel p on, up to panel `to` or a strip of them, bias
// included, in sum (R, STRIP). Return how many there are.
static int multiply(int kind, const Operand *x, int rows, const Linear *linear, int p, int to,
                    float *sum) {
    const int panels = to - p < PANELS ? to - p : PANELS;
    const int inputs = kind == INT8 ? (linear->inputs + 1) / 2 * 2 : linear->inputs;
    const long panel_bytes = PANEL * (long)inputs * element_size(kind);
    const char *weights = (const char *)linear->weights + p * panel_bytes;
    if (kind == FLOAT32) add_strip(FLOAT32, x, rows, weights, panel_bytes, panels, inputs, sum);
    if (kind == BFLOAT16) add_strip(BFLOAT16, x, rows, weights, panel_bytes, panels, inputs, sum);
    if (kind == INT8) {
        add_strip(INT8, x, rows, weights, panel_bytes, panels, inputs, sum);
        const float *scales = linear->scales + p * PANEL;
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < panels * PANEL; o++) {
                int32_t exact;
                memcpy(&exact, sum + r * STRIP + o, 4);
                sum[r * STRIP + o] = (float)exact * (x->scales[r] * scales[o]);
            }
    }
    if (linear->bias)
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < panels * PANEL; o++)
                sum[r * STRIP + o] += linear->bias[p * PANEL + o];
    int left = linear->outputs - p * PANEL;
    return left < panels * PANEL ? left : panels * PANEL;
}

// Copy a row into the operand; for int8 as integers, by the row's own scale.
static void set_row(int kind, Operand *x, int r, const float *row, int inputs, float levels) {
    if (kind != INT8) {
        memcpy((float *)x->rows + r * x->stride, row, sizeof(float) * inputs);
        return;
    }
    int16_t *q = (int16_t *)x->rows + r * x->stride;
    float largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < inputs; i++) {
        float size = fabsf(row[i]);
        largest = size > largest ? size : largest;
    }
    float inverse = largest > 0 ? levels / largest : 0;
    x->scales[r] = largest / levels;
    for (int i = 0; i < inputs; i++) q[i] = (int16_t)(int32_t)rintf(row[i] * inverse);
    if (inputs % 2) q[inputs] = 0;
}

static void set_norm_row(int kind, Operand *x, int r, const float *row, const float *gain,
                         int inputs, float eps, float levels, float *scratch) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < inputs; i++) sum += row[i] * row[i];
    float inverse = 1 / sqrtf(sum / inputs + eps);
    float *out = kind == INT8 ? scratch : (float *)x->rows + r * x->stride;
    for (int i = 0; i < inputs; i++) out[i] = row[i] * inverse * gain[i];
    if (kind == INT8) set_row(kind, x, r, out, inputs, levels);
}

// ---- functions -----------------------------------------------------------------------------

// exp(x) for x <= 88, to 2 units in the last place; 0 below -87.3.
INLINE float fast_exp(float x) {
    float n = x * 1.44269504f + 12582912.0f;  // rounds to an integer
    n -= 12582912.0f;
    float y = x - n * 0.693359375f + n * 2.12194440e-4f;
    float poly = 1.9875691500e-4f;
    poly = poly * y + 1.3981999507e-3f;
    poly = poly * y + 8.3334519073e-3f;
    poly = poly * y + 4.1665795894e-2f;
    poly = poly * y + 1.6666665459e-1f;
    poly = poly * y + 5.0000001201e-1f;
    poly = poly * (y * y) + y + 1;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return x < -87.3f ? 0 : poly * power.value;
}

INLINE float silu(float x) { return x / (1 + fast_exp(x > -87 ? -x : 87)); }

INLINE float gelu(float x) { return 0.5f * x * (1 + erff(x * 0.70710678f)); }

// ---- attention -----------------------------------------------------------------------------

// The two features of a rotary pair are half a head apart.
static void rotate(float *head, const float *rope, int head_dim) {
    const int pairs = head_dim / 2;
    const float *sine = rope + pairs;
    for (int p = 0; p < pairs; p++) {
        float a = head[p], b = head[p + pairs];
        head[p] = a * rope[p] - b * sine[p];
        head[p + pairs] = a * sine[p] + b * rope[p];
    }
}

// The sums of the 8 numbers in each of four vectors.
INLINE void sum_each(const floats *a, float *sums) {
#ifdef __AVX2__
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a[0], (__m256)a[1]),
                                  _mm256_hadd_ps((__m256)a[2], (__m256)a[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    for (int j = 0; j < 4; j++) {
        floats v = a[j];
        sums[j] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
#endif
}

// Four scores at a time; `vectors` is a constant, so that the query and the result stay in
// registers. A slot's score does not depend on the other slots.
INLINE void attend_in_vectors(int vectors, const float *query, const float *keys,
                              const float *values, int columns, float scale, float *scores,
                              float *out) {
    const long head_dim = vectors * 8L;
    floats q[16], sum[16];
    for (int v = 0; v < vectors; v++) q[v] = *(const floats *)(query + 8 * v);
    float largest = -INFINITY;
    for (int s = 0; s < columns; s += 4) {
        floats dot[4];
        int count = columns - s < 4 ? columns - s : 4;
        for (int j = 0; j < 4; j++) {
            const float *key = keys + (s + (j < count ? j : 0)) * head_dim;
            dot[j] = q[0] * *(const floats *)key;
            for (int v = 1; v < vectors; v++) dot[j] += q[v] * *(const floats *)(key + 8 * v);
        }
        float four[4];
        sum_each(dot, four);
        for (int j = 0; j < count; j++) {
            scores[s + j] = four[j] * scale;
            largest = scores[s + j] > largest ? scores[s + j] : largest;
        }
    }
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int s = 0; s < columns; s++) {
        scores[s] = fast_exp(scores[s] - largest);
        total += scores[s];
    }
    for (int v = 0; v < vectors; v++) sum[v] = (floats){0};
    for (int s = 0; s < columns; s++)
        for (int v = 0; v < vectors; v++)
            sum[v] += scores[s] * *(const floats *)(values + s * head_dim + 8 * v);
    float inverse = 1 / total;
    for (int v = 0; v < vectors; v++) *(floats *)(out + 8 * v) = sum[v] * inverse;
}

// out (H,) = softmax(scale query . keys) values, over the first `columns` slots.
static void attend(const float *query, const float *keys, const float *values, int columns,
                   int head_dim, float scale, float *scores, float *out) {
    switch (head_dim) {
        case 16: attend_in_vectors(2, query, keys, values, columns, scale, scores, out); return;
        case 32: attend_in_vectors(4, query, keys, values, columns, scale, scores, out); return;
        case 64: attend_in_vectors(8, query, keys, values, columns, scale, scores, out); return;
        case 128: attend_in_vectors(16, query, keys, values, columns, scale, scores, out); return;
    }
    float largest = -INFINITY, total = 0;
    for (int s = 0; s < columns; s++) {
        const float *key = keys + (long)s * head_dim;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int h = 0; h < head_dim; h++) dot += query[h] * key[h];
        scores[s] = dot * scale;
        largest = scores[s] > largest ? scores[s] : largest;
    }
    memset(out, 0, sizeof(float) * head_dim);
    for (int s = 0; s < columns; s++) {
        float weight = fast_exp(scores[s] - largest);
        total += weight;
        for (int h = 0; h < head_dim; h++) out[h] += weight * values[(long)s * head_dim + h];
    }
    for (int h = 0; h < head_dim; h++) out[h] /= total;
}

// ---- what Python calls ---------------------------------------------------------------------

static void share(int num_items, int *from, int *to) {
    int thread = 0, threads = 1;
#ifdef _OPENMP
    thread = omp_get_thread_num();
    threads = omp_get_num_threads();
#endif
    *from = (int)((long)num_items * thread / threads);
    *to = (int)((long)num_items * (thread + 1) / threads);
}

// Floats of work space: what the threads share, then what each has of its own.
static long shared_floats(const Dims *d, int rows) {
    return (long)rows * ((2L * d->heads + 2L * d->kv_heads) * d->head_dim + d->ffn);
}

static long widest(const Dims *d) {
    long width = d->width, attended = (long)d->heads * d->head_dim, ffn = d->ffn;
    long most = width > attended ? width : attended;
    return ((most > ffn ? most : ffn) + 15) / 16 * 16;
}

static long own_floats(const Dims *d, int rows, long slots) {
    return rows * (widest(d) + 1 + STRIP * 2L) + widest(d) + slots;
}

long nvium_work_floats(const Dims *d, int rows, long slots, int threads) {
    return shared_floats(d, rows) + threads * own_floats(d, rows, slots);
}

void nvium_run_block(const Dims *d, const Layer *layers, int num_layers, const Group *groups,
                     int num_groups, long most_slots, float *work, int threads) {
    float *x[MAX_ROWS];
    const Group *group_of[MAX_ROWS];
    int position[MAX_ROWS], rows = 0;
    for (int g = 0; g < num_groups; g++)
        for (int r = 0; r < groups[g].rows; r++, rows++) {
            position[rows] = groups[g].first + r;
            group_of[rows] = &groups[g];
            x[rows] = groups[g].output + (long)position[rows] * d->width;
            memcpy(x[rows], groups[g].input + (long)position[rows] * d->width,
                   sizeof(float) * d->width);
        }
    const int kind = d->kind, head_dim = d->head_dim, per_group = d->heads / d->kv_heads;
    const long q_width = (long)d->heads * head_dim, kv_width = (long)d->kv_heads * head_dim;
    const long qkv_width = q_width + 2 * kv_width;
    float *qkv = work, *attended = qkv + rows * qkv_width, *hidden = attended + rows * q_width;
#pragma omp parallel num_threads(threads)
    {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        float *own = work + shared_floats(d, rows) + thread * own_floats(d, rows, most_slots);
        Operand in = {own, widest(d), own + rows * widest(d)};
        float *sum = in.scales + rows, *sum_2 = sum + (long)rows * STRIP;
        float *normed = sum_2 + (long)rows * STRIP, *scores = normed + widest(d);
        if (kind == INT8) in.stride *= 2;  // int16 in the same space
        int from, to;
        for (int l = 0; l < num_layers; l++) {
            const Layer *layer = &layers[l];
            for (int r = 0; r < rows; r++)
                set_norm_row(kind, &in, r, x[r], layer->attn_norm, d->width, d->eps,
                             layer->qkv.levels, normed);
            share(num_panels(&layer->qkv), &from, &to);
            for (int p = from; p < to; p += PANELS) {
                int count = multiply(kind, &in, rows, &layer->qkv, p, to, sum);
                for (int r = 0; r < rows; r++)
                    memcpy(qkv + r * qkv_width + p * PANEL, sum + r * STRIP, sizeof(float) * count);
            }
#pragma omp barrier
            share(d->kv_heads, &from, &to);
            for (int g = from; g < to; g++) {
                for (int r = 0; r < rows; r++) {
                    float *heads = qkv + r * qkv_width;
                    float *key = heads + q_width + g * head_dim;
                    const float *rope = d->rope + (long)position[r] * head_dim;
                    const long slots = group_of[r]->slots;
                    float *keys = group_of[r]->kv + (l * 2L * d->kv_heads + g) * slots * head_dim;
                    float *values = keys + d->kv_heads * slots * head_dim;
                    for (int h = g * per_group; h < (g + 1) * per_group; h++)
                        rotate(heads + h * head_dim, rope, head_dim);
                    rotate(key, rope, head_dim);
                    memcpy(keys + (long)position[r] * head_dim, key, sizeof(float) * head_dim);
                    memcpy(values + (long)position[r] * head_dim, key + kv_width,
                           sizeof(float) * head_dim);
                }
                for (int r = 0; r < rows; r++) {
                    const long slots = group_of[r]->slots;
                    float *keys = group_of[r]->kv + (l * 2L * d->kv_heads + g) * slots * head_dim;
                    for (int h = g * per_group; h < (g + 1) * per_group; h++)
                        attend(qkv + r * qkv_width + h * head_dim, keys,
                               keys + d->kv_heads * slots * head_dim, position[r] + 1, head_dim,
                               d->scale, scores, attended + r * q_width + h * head_dim);
                }
            }
#pragma omp barrier
            for (int r = 0; r < rows; r++)
                set_row(kind, &in, r, attended + r * q_width, q_width, layer->attn_out.levels);
            share(num_panels(&layer->attn_out), &from, &to);
            for (int p = from; p < to; p += PANELS) {
                int count = multiply(kind, &in, rows, &layer->attn_out, p, to, sum);
                for (int r = 0; r < rows; r++)
                    for (int o = 0; o < count; o++) x[r][p * PANEL + o] += sum[r * STRIP + o];
            }
#pragma omp barrier
            for (int r = 0; r < rows; r++)
                set_norm_row(kind, &in, r, x[r], layer->mlp_norm, d->width, d->eps,
                             layer->gate.levels, normed);
            share(num_panels(&layer->gate), &from, &to);
            for (int p = from; p < to; p += PANELS) {
                int count = multiply(kind, &in, rows, &layer->gate, p, to, sum);
                multiply(kind, &in, rows, &layer->up, p, to, sum_2);
                for (int r = 0; r < rows; r++) {
                    float *out = hidden + (long)r * d->ffn + p * PANEL;
                    const float *gate = sum + r * STRIP, *up = sum_2 + r * STRIP;
                    for (int o = 0; o < count; o++) out[o] = silu(gate[o]) * up[o];
                }
            }
#pragma omp barrier
            for (int r = 0; r < rows; r++)
                set_row(kind, &in, r, hidden + (long)r * d->ffn, d->ffn, layer->down.levels);
            share(num_panels(&layer->down), &from, &to);
            for (int p = from; p < to; p += PANELS) {
                int count = multiply(kind, &in, rows, &layer->down, p, to, sum);
                for (int r = 0; r < rows; r++)
                    for (int o = 0; o < count; o++) x[r][p * PANEL + o] += sum[r * STRIP + o];
            }
#pragma omp barrier
        }
    }
}

// out (R, D) = RMSNorm(x (R, D)).
void nvium_norm(const float *x, const float *gain, int width, float eps, int rows, float *out) {
    Operand operand = {out, width, 0};
    for (int r = 0; r < rows; r++)
        set_norm_row(FLOAT32, &operand, r, x + (long)r * width, gain, width, eps, 0, 0);
}

// out (R,) = RMSNorm(x (R, D)) . weight + bias; x is overwritten.
void nvium_score(float *x, const float *gain, const float *weight, float bias, int width,
                 float eps, int rows, float *out) {
    nvium_norm(x, gain, width, eps, rows, x);
    for (int r = 0; r < rows; r++) {
        const float *row = x + (long)r * width;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int i = 0; i < width; i++) dot += row[i] * weight[i];
        out[r] = dot + bias;
    }
}

enum { PLAIN, SILU, GELU };

// out (R, O) = act(x (R, I) W + bias) + residual, which may be null or `out` itself.
// Called by all threads of a region; the caller puts the barrier behind it.
static void apply(int kind, const float *x, const Linear *linear, int act, const float *residual,
                  int rows, float *out, float *own) {
    const int stride = (linear->inputs + 15) / 16 * 16, outputs = linear->outputs;
    Operand in = {own, kind == INT8 ? 2L * stride : stride, own + (long)rows * stride};
    float *sum = in.scales + rows;
    for (int r = 0; r < rows; r++)
        set_row(kind, &in, r, x + (long)r * linear->inputs, linear->inputs, linear->levels);
    int from, to;
    share(num_panels(linear), &from, &to);
    for (int p = from; p < to; p += PANELS) {
        int count = multiply(kind, &in, rows, linear, p, to, sum);
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < count; o++) {
                float y = sum[r * STRIP + o];
                if (act == SILU) y = silu(y);
                if (act == GELU) y = gelu(y);
                long at = (long)r * outputs + p * PANEL + o;
                out[at] = residual ? y + residual[at] : y;
            }
    }
}

static long apply_floats(const Linear *linear, int rows) {
    return rows * ((linear->inputs + 15L) / 16 * 16 + 1 + STRIP);
}

// out (R, O_2) = W_2 act(W_1 x + b_1) + b_2 + residual: an adapter, or a router up to its norm.
void nvium_two_layers(int kind, const Linear *first, const Linear *second, int act, const float *x,
                      const float *residual, int rows, float *out, float *work, int threads) {
    float *hidden = work;
    long floats_1 = apply_floats(first, rows), floats_2 = apply_floats(second, rows);
    long own_size = floats_1 > floats_2 ? floats_1 : floats_2;
#pragma omp parallel num_threads(threads)
    {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        float *own = work + (long)rows * first->outputs + thread * own_size;
        apply(kind, x, first, act, 0, rows, hidden, own);
#pragma omp barrier
        apply(kind, hidden, second, PLAIN, residual, rows, out, own);
    }
}

// out (R, O) = W x.
void nvium_linear(int kind, const Linear *linear, const float *x, int rows, float *out,
                  float *work, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        apply(kind, x, linear, PLAIN, 0, rows, out, work + thread * apply_floats(linear, rows));
    }
}

typedef struct {
    const float *norm, *router_norm, *leave;  // (D,)
    float leave_bias;
    int32_t has_adapter;
    Linear adapter_in, adapter_out, fc1, fc2;
} Exit;

// All of a model that one token may need.
typedef struct {
    Dims dims;
    const Layer *const *blocks;
    const int32_t *num_layers;
    const Exit *exits;
    int32_t num_exits;
    Linear head;
} Model;

// Run what the last token of a sequence needs: owed rows of its blocks, junctions, one exit.
//
// It leaves at junction k if its router logit exceeds thresholds[k], which is infinite where the
// exit is forced; without `reads_router` the routers are not run. `filled` counts the positions
// that each block has, and moves with them. Returns the exit; writes its logits (V,).
int32_t nvium_run_token(const Model *m, Group *groups, int32_t *filled, int length,
                        int largest_group, const double *thresholds, int reads_router,
                        float *logits, float *work, int threads) {
    const Dims *d = &m->dims;
    float *n = work, *o = n + d->width, *score = o + d->width;
    work = score + d->width;
    int k = 0;
    for (;; k++) {
        Group *group = &groups[k];
        while (filled[k] < length) {
            group->first = filled[k];
            group->rows = length - filled[k] < largest_group ? length - filled[k] : largest_group;
            nvium_run_block(d, m->blocks[k], m->num_layers[k], group, 1, length, work, threads);
            filled[k] += group->rows;
        }
        const Exit *exit = &m->exits[k];
        nvium_norm(group->output + (length - 1L) * d->width, exit->norm, d->width, d->eps, 1, n);
        if (k == m->num_exits - 1) break;
        const int is_forced = thresholds[k] == -INFINITY;
        if (reads_router) {
            float z;
            nvium_two_layers(d->kind, &exit->fc1, &exit->fc2, GELU, n, 0, 1, score, work, threads);
            nvium_score(score, exit->router_norm, exit->leave, exit->leave_bias, d->width, d->eps,
                        1, &z);
            if (z > thresholds[k]) break;
        }
        if (is_forced) break;
    }
    const Exit *exit = &m->exits[k];
    if (exit->has_adapter) {
        nvium_two_layers(d->kind, &exit->adapter_in, &exit->adapter_out, SILU, n, n, 1, o, work,
                         threads);
        n = o;
    }
    nvium_linear(d->kind, &m->head, n, 1, logits, work, threads);
    return k;
}

// The token with the largest logit / temperature + Gumbel noise: a draw from the softmax; the
// argmax at temperature 0.
//
// Noise is that of `decode.noise.gumbel_noise`, in float64. Few tokens need it: one with noise
// -log(-log u) beats the best so far only if 1 - u <= -log u < exp(its score - the best score).
int32_t nvium_sample(const float *logits, int count, uint64_t key, double temperature) {
    enum { CHUNK = 256 };
    float largest = -INFINITY, weight[CHUNK];
    const float scale = (float)(1 / temperature);
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < count; i++) largest = logits[i] > largest ? logits[i] : largest;
    if (temperature == 0) {
        int first = 0;
        while (first < count - 1 && logits[first] != largest) first++;
        return first;
    }
    int32_t token = 0;
    double best = -INFINITY, best_weight = 0;
    for (int from = 0; from < count; from += CHUNK) {
        int size = count - from < CHUNK ? count - from : CHUNK;
#pragma omp simd
        for (int i = 0; i < size; i++) weight[i] = fast_exp((logits[from + i] - largest) * scale);
        for (int i = 0; i < size; i++) {
            uint64_t x = key + (uint64_t)(from + i + 1) * 0x9e3779b97f4a7c15u;
            x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
            x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
            x ^= x >> 31;
            // 52 bits plus a half are exact in float64 and never 0 or 1.
            double u = ((double)(int64_t)(x >> 12) + 0.5) * 0x1p-52;
            // The margin is far above the rounding of fast_exp and of the scaled float32 logit.
            if ((1 - u) * best_weight > weight[i] * 1.001) continue;
            double logit = logits[from + i];
            double score = temperature == 1 ? logit : (logit - largest) / temperature;
            score -= log(-log(u));
            if (score > best) {
                best = score;
                token = from + i;
                best_weight = exp(temperature == 1 ? best - largest : best);
            }
        }
    }
    return token;
}
