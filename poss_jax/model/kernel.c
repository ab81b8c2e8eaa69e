// Products with tiled int8 weights, attention, RMSNorm and noise (AVX-512 VNNI); see kernel.py.
//
// Threads of XLA's pool take one piece of the work after the other; the caller takes part and waits
// only for pieces that others have begun, so it does not matter when, or if, the pool runs its
// tasks.

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#define AVX512 __attribute__((target("avx512f,avx512dq,avx512vnni,fma,popcnt")))
#define INLINE AVX512 __attribute__((always_inline)) static inline

// Threads

typedef struct {
  void (*run)(const void *work, int64_t piece);
  const void *work;
  int64_t num_pieces;
  atomic_long next, num_done, num_users;
  atomic_bool is_ready;
} Job;

static void release(Job *job) {
  if (atomic_fetch_sub(&job->num_users, 1) == 1) free(job);
}

// Waits a moment; now and then it is another thread's turn, as there may be more than cores.
static void spin(unsigned turn) {
  if (turn % 1024) _mm_pause();
  else sched_yield();
}

static void take_part(void *data) {
  Job *job = data;
  for (unsigned turn = 1; !atomic_load(&job->is_ready); ++turn) spin(turn);
  for (int64_t piece; (piece = atomic_fetch_add(&job->next, 1)) < job->num_pieces;) {
    job->run(job->work, piece);
    atomic_fetch_add(&job->num_done, 1);
  }
  release(job);
}

static bool failed(const XLA_FFI_Api *api, XLA_FFI_Error *error) {
  if (!error) return false;
  XLA_FFI_Error_Destroy_Args args = {sizeof args, NULL, error};
  api->XLA_FFI_Error_Destroy(&args);
  return true;
}

static int64_t count_threads(const XLA_FFI_CallFrame *frame) {
  int64_t count = 1;
  XLA_FFI_ThreadPool_NumThreads_Args pool = {sizeof pool, NULL, frame->ctx, &count};
  const bool is_unknown = failed(frame->api, frame->api->XLA_FFI_ThreadPool_NumThreads(&pool));
  return is_unknown || count < 1 ? 1 : count;
}

// Wakes up to `max_helpers` more threads; `work` may change until `finish`.
static Job *begin(XLA_FFI_CallFrame *frame, void (*run)(const void *, int64_t), const void *work,
                  int64_t num_pieces, int64_t max_helpers) {
  const XLA_FFI_Api *api = frame->api;
  int64_t num_helpers = count_threads(frame) - 1;
  if (num_helpers > max_helpers) num_helpers = max_helpers;
  if (num_helpers >= num_pieces) num_helpers = num_pieces > 0 ? num_pieces - 1 : 0;
  Job *job = malloc(sizeof *job);
  if (!job) abort();
  job->run = run;
  job->work = work;
  job->num_pieces = num_pieces;
  atomic_init(&job->next, 0);
  atomic_init(&job->num_done, 0);
  atomic_init(&job->num_users, num_helpers + 2);
  atomic_init(&job->is_ready, false);
  for (int64_t i = 0; i < num_helpers; ++i) {
    XLA_FFI_ThreadPool_Schedule_Args task = {sizeof task, NULL, frame->ctx, take_part, job};
    if (failed(api, api->XLA_FFI_ThreadPool_Schedule(&task))) release(job);
  }
  return job;
}

static void finish(Job *job) {
  atomic_store(&job->is_ready, true);
  take_part(job);
  for (unsigned turn = 1; atomic_load(&job->num_done) < job->num_pieces; ++turn) spin(turn);
  release(job);
}

static bool asks_version(XLA_FFI_CallFrame *frame) {  // at registration
  const XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return true;
}

static const XLA_FFI_Buffer *argument(const XLA_FFI_CallFrame *frame, int index) {
  return frame->args.args[index];
}

static int64_t divide_up(int64_t size, int64_t by) { return (size + by - 1) / by; }

static int64_t padded(int64_t size) { return (size + 15) & ~(int64_t)15; }

INLINE __mmask16 mask_of(int64_t count) {
  return count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0;
}

// Cosines and sines, which XLA would compute again in every product that they are factors of

XLA_FFI_Error *cosines(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *angles = argument(frame, 0);
  XLA_FFI_Buffer **out = (XLA_FFI_Buffer **)frame->rets.rets;
  int64_t size = 1;
  for (int64_t i = 0; i < angles->rank; ++i) size *= angles->dims[i];
  for (int64_t i = 0; i < size; ++i) {
    const float angle = ((const float *)angles->data)[i];
    ((float *)out[0]->data)[i] = cosf(angle);
    ((float *)out[1]->data)[i] = sinf(angle);
  }
  return NULL;
}

// RMSNorm

AVX512 static void normalise_row(const float *row, const float *scale, float *out, int64_t size,
                                 float eps) {
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) {
    const __m512 elements = _mm512_maskz_loadu_ps(mask_of(size - i), row + i);
    total = _mm512_fmadd_ps(elements, elements, total);
  }
  const float factor = 1 / sqrtf(_mm512_reduce_add_ps(total) / size + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = row[i] * factor * scale[i];
}

XLA_FFI_Error *normalise(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *rows = argument(frame, 0), *out = frame->rets.rets[0];
  const float eps = *(const float *)((XLA_FFI_Scalar *)frame->attrs.attrs[0])->value;
  const int64_t num_rows = rows->dims[0], size = rows->dims[1];
  for (int64_t i = 0; i < num_rows * size; i += size)
    normalise_row((const float *)rows->data + i, argument(frame, 1)->data, (float *)out->data + i,
                  size, eps);
  return NULL;
}

// Gumbel noise, as jax.random.gumbel(mode="high") draws it: two Threefry-2x32 hashes per number

enum { BLOCK = 4096 };  // numbers per piece

typedef struct {
  const uint32_t *keys;  // [num_keys 2]
  float *out;            // [num_keys size]
  int64_t size, num_blocks;
} Noise;

INLINE __m512i hash(const uint32_t *key, uint32_t first) {
  const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i high = _mm512_set1_epi32(keys[0]);
  __m512i low = _mm512_add_epi32(lanes, _mm512_set1_epi32(first + keys[1]));
  _Pragma("GCC unroll 5") for (int turn = 0; turn < 5; ++turn) {
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
      high = _mm512_add_epi32(high, low);
      low = _mm512_rolv_epi32(low, _mm512_set1_epi32(rotations[turn % 2][i]));
      low = _mm512_xor_si512(low, high);
    }
    high = _mm512_add_epi32(high, _mm512_set1_epi32(keys[(turn + 1) % 3]));
    low = _mm512_add_epi32(low, _mm512_set1_epi32(keys[(turn + 2) % 3] + turn + 1));
  }
  return _mm512_xor_si512(high, low);
}

INLINE __m512 to_uniform(__m512i bits) {  // [0, 1) in steps of 2^-23
  return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(bits, 9)), _mm512_set1_ps(0x1p-23f));
}

INLINE __m512 logarithm(__m512 x) {  // of normal numbers above 0
  const __m512 mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const __m512 exponent = _mm512_sub_ps(_mm512_getexp_ps(x), _mm512_getexp_ps(mantissa));
  const __m512 unit = _mm512_set1_ps(1);
  const __m512 t = _mm512_div_ps(_mm512_sub_ps(mantissa, unit), _mm512_add_ps(mantissa, unit));
  const __m512 square = _mm512_mul_ps(t, t);
  __m512 sum = _mm512_set1_ps(2.0f / 11);
  const float factors[] = {2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2};
  for (int i = 0; i < 5; ++i) sum = _mm512_fmadd_ps(sum, square, _mm512_set1_ps(factors[i]));
  return _mm512_fmadd_ps(exponent, _mm512_set1_ps(0.693147181f), _mm512_mul_ps(sum, t));
}

AVX512 static void draw_block(const void *work, int64_t piece) {
  const Noise *noise = work;
  const int64_t row = piece / noise->num_blocks, first = piece % noise->num_blocks * BLOCK;
  const uint32_t *key = noise->keys + 2 * row;
  for (int64_t i = first; i < first + BLOCK && i < noise->size; i += 16) {
    const __m512 high = to_uniform(hash(key, i)), low = to_uniform(hash(key, noise->size + i));
    const __m512 small = _mm512_fmadd_ps(low, _mm512_set1_ps(0x1p-23f), _mm512_set1_ps(FLT_MIN));
    const __mmask16 is_small = _mm512_cmp_ps_mask(high, _mm512_set1_ps(0.5f), _CMP_LT_OQ);
    const __m512 x = _mm512_mask_add_ps(high, is_small, high, small), unit = _mm512_set1_ps(1);
    // -log(1 - x), by Kahan's correction of what 1 - x has lost
    const __m512 rest = _mm512_sub_ps(unit, x), lost = _mm512_sub_ps(unit, rest);
    const __mmask16 is_more = _mm512_cmp_ps_mask(lost, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    const __m512 ratio = _mm512_mask_div_ps(_mm512_set1_ps(-1), is_more, logarithm(rest), lost);
    const __m512 drawn = _mm512_mul_ps(x, ratio), zero = _mm512_setzero_ps();
    const __m512 exponential = _mm512_sub_ps(zero, drawn);
    _mm512_mask_storeu_ps(noise->out + row * noise->size + i, mask_of(noise->size - i),
                          _mm512_sub_ps(zero, logarithm(exponential)));
  }
}

XLA_FFI_Error *gumbel(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *keys = argument(frame, 0), *out = frame->rets.rets[0];
  const int64_t size = out->dims[out->rank - 1], num_blocks = divide_up(size, BLOCK);
  int64_t num_pieces = num_blocks;
  for (int64_t i = 0; i < keys->rank - 1; ++i) num_pieces *= keys->dims[i];
  const Noise noise = {keys->data, out->data, size, num_blocks};
  finish(begin(frame, draw_block, &noise, num_pieces, INT64_MAX));
  return NULL;
}

// Products
//
// Rows become uint8 limbs, as linear.py says. A tile holds 32 outputs: for every four elements of a
// row, the 32 x 4 values that meet them. So a tile is read from end to end, once for up to 12 limbs
// of rows, whose sums stay in registers.

enum { TILE = 32, MAX_LIMBS = 12 };

#define FOR_LIMBS _Pragma("GCC unroll 12") for (int limb = 0; limb < num_limbs; ++limb)

typedef struct {
  const uint8_t *limbs;     // [num_rows num_limbs in_dim], the largest limb of a row first
  const float *row_scales;  // [num_rows]
  const int8_t *values;     // [num_tiles in_dim / 4, 32, 4]
  const int32_t *sums;      // [out_dim] of each output's values
  const float *scales;      // [out_dim]
  float *out;               // [num_rows out_dim]
  int64_t num_rows, num_limbs, in_dim, out_dim, piece_size;  // tiles
} Product;

// Writes a row as limbs plus 128, times a scale, which it returns.
AVX512 static float split(const float *row, uint8_t *limbs, int64_t in_dim, int64_t num_limbs) {
  __m512i bits = _mm512_setzero_si512();  // of absolute values; NaN is above all numbers
  for (int64_t i = 0; i < in_dim; i += 16) {
    const __m512i elements = _mm512_maskz_loadu_epi32(mask_of(in_dim - i), row + i);
    bits = _mm512_max_epi32(bits, _mm512_and_epi32(elements, _mm512_set1_epi32(INT32_MAX)));
  }
  const int32_t highest_bits = _mm512_reduce_max_epi32(bits);
  float highest;
  memcpy(&highest, &highest_bits, 4);
  const float scale = highest == 0 ? 1 : highest * (1.0f / 127);
  float factor = 1 / scale;
  int32_t offset = 128;
  for (int64_t limb = 1; limb < num_limbs; ++limb) factor *= 256, offset = offset * 256 + 128;
  for (int64_t i = 0; i < in_dim; i += 16) {
    const __m512 elements = _mm512_maskz_loadu_ps(mask_of(in_dim - i), row + i);
    __m512i fixed_point = _mm512_cvtps_epi32(_mm512_mul_ps(elements, _mm512_set1_ps(factor)));
    fixed_point = _mm512_add_epi32(fixed_point, _mm512_set1_epi32(offset));
    for (int64_t limb = num_limbs - 1; limb >= 0; --limb) {
      uint8_t *place = limbs + limb * padded(in_dim) + i;
      _mm_storeu_si128((__m128i *)place, _mm512_cvtepi32_epi8(fixed_point));
      fixed_point = _mm512_srai_epi32(fixed_point, 8);
    }
  }
  return scale;
}

// Multiplies limbs by a tile while `next`, a part of the next one, is read into the cache.
INLINE void multiply(const uint8_t *limbs, const int8_t *tile, const int8_t *next, int64_t step,
                     int32_t *sums, int64_t in_dim, const int num_limbs) {
  __m512i low[MAX_LIMBS], high[MAX_LIMBS];
  FOR_LIMBS low[limb] = high[limb] = _mm512_setzero_si512();
  for (int64_t i = 0; i < in_dim; i += 4, tile += 4 * TILE, next += step) {
    _mm_prefetch((const char *)next, _MM_HINT_T1);
    _mm_prefetch((const char *)next + 64, _MM_HINT_T1);
    const __m512i low_values = _mm512_loadu_si512(tile);
    const __m512i high_values = _mm512_loadu_si512(tile + 2 * TILE);
    FOR_LIMBS {
      int32_t elements;
      memcpy(&elements, limbs + limb * padded(in_dim) + i, 4);
      const __m512i repeated = _mm512_set1_epi32(elements);
      low[limb] = _mm512_dpbusd_epi32(low[limb], repeated, low_values);
      high[limb] = _mm512_dpbusd_epi32(high[limb], repeated, high_values);
    }
  }
  FOR_LIMBS {
    _mm512_store_si512(sums + limb * TILE, low[limb]);
    _mm512_store_si512(sums + limb * TILE + TILE / 2, high[limb]);
  }
}

// One copy of the loops for every number of limbs.
#define CASE(n) \
  case n:       \
    return multiply(limbs, tile, next, step, sums, in_dim, n);

AVX512 static void multiply_limbs(const uint8_t *limbs, const int8_t *tile, const int8_t *next,
                                  int64_t step, int32_t *sums, int64_t in_dim, int64_t num_limbs) {
  switch (num_limbs) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
}

// Joins the sums of a row's limbs, [num_limbs 32], to its outputs of one tile.
AVX512 static void join(const Product *product, const int32_t *sums, int64_t row, int64_t tile) {
  const int32_t *value_sums = product->sums + tile * TILE;
  const float *scales = product->scales + tile * TILE, row_scale = product->row_scales[row];
  float *out = product->out + row * product->out_dim + tile * TILE;
  float total[TILE] = {0};
  for (int64_t limb = product->num_limbs - 1; limb >= 0; --limb)
    for (int i = 0; i < TILE; ++i)
      total[i] = (float)(sums[limb * TILE + i] - 128 * value_sums[i]) + total[i] / 256;
  for (int i = 0; i < TILE; ++i) out[i] = total[i] * row_scale * scales[i];
}

static void multiply_tile(const Product *product, int64_t tile) {
  alignas(64) int32_t sums[MAX_LIMBS * TILE];
  const int64_t in_dim = product->in_dim, num_limbs = product->num_limbs;
  const int64_t num_rows = product->num_rows, max_rows = MAX_LIMBS / num_limbs;
  const int64_t num_passes = divide_up(num_rows, max_rows);
  const int8_t *values = product->values + tile * TILE * in_dim, *next = values + TILE * in_dim;
  for (int64_t pass = 0; pass < num_passes; ++pass) {
    const int64_t first = pass * num_rows / num_passes, end = (pass + 1) * num_rows / num_passes;
    multiply_limbs(product->limbs + first * num_limbs * padded(in_dim), values,
                   next + pass * TILE * in_dim / num_passes, 4 * TILE / num_passes, sums, in_dim,
                   (end - first) * num_limbs);
    for (int64_t row = first; row < end; ++row)
      join(product, sums + (row - first) * num_limbs * TILE, row, tile);
  }
}

static void multiply_tiles(const void *work, int64_t piece) {
  const Product *product = work;
  const int64_t first = piece * product->piece_size, num_tiles = product->out_dim / TILE;
  for (int64_t tile = first; tile < first + product->piece_size && tile < num_tiles; ++tile)
    multiply_tile(product, tile);
}

XLA_FFI_Error *multiply_rows(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *rows = argument(frame, 0), *out = frame->rets.rets[0];
  const int64_t num_limbs = *(const int64_t *)((XLA_FFI_Scalar *)frame->attrs.attrs[0])->value;
  const int64_t num_rows = rows->dims[0], in_dim = rows->dims[1], out_dim = out->dims[1];
  float *row_scales = malloc(num_rows * (sizeof(float) + num_limbs * padded(in_dim)));
  if (!row_scales) abort();
  uint8_t *limbs = (uint8_t *)(row_scales + num_rows);
  const Product product = {limbs, row_scales, argument(frame, 1)->data, argument(frame, 2)->data,
                           argument(frame, 3)->data, out->data, num_rows, num_limbs, in_dim,
                           out_dim, divide_up(out_dim / TILE, 4 * count_threads(frame))};
  const int64_t num_pieces = divide_up(out_dim / TILE, product.piece_size);
  Job *job = begin(frame, multiply_tiles, &product, num_pieces, INT64_MAX);
  for (int64_t row = 0; row < num_rows; ++row)  // while the others wake up
    row_scales[row] = split((const float *)rows->data + row * in_dim,
                            limbs + row * num_limbs * padded(in_dim), in_dim, num_limbs);
  finish(job);
  free(row_scales);
  return NULL;
}

// Attention
//
// A query's keys are the committed ones and those of its own tree's path, in this order; masked
// ones are left out, not added as zeros. All sums follow the order of these keys, so a query's
// bits depend on its path alone: not on its neighbours, nor on which keys are committed.

enum { KEYS = 16, CHUNK = 64, MAX_QUERIES = 8, MIN_WORK = 1 << 16 };

#define FOR_4(i) _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)

typedef struct {
  const float *q;                   // [B K groups T H]
  const float *stored[2], *own[2];  // keys and values, [B K S H] and [B K M H]
  const int32_t *length;            // [B]
  const uint8_t *can_attend;        // [B or 1, T M]
  float *out;                       // [B T K groups H]
  int64_t K, T, H, S, M, num_groups, num_blocks, mask_size;
} Attention;

INLINE __m512 exponential(__m512 x) {  // of 0 and below
  x = _mm512_max_ps(_mm512_set1_ps(-200), x);  // in this order NaN stays
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
  __m512 sum = _mm512_set1_ps(1.0f / 5040);
  const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
  for (int i = 0; i < 7; ++i) sum = _mm512_fmadd_ps(sum, x, _mm512_set1_ps(factors[i]));
  return _mm512_scalef_ps(sum, n);
}

static void read_ahead(const float *next, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) _mm_prefetch((const char *)(next + i), _MM_HINT_T0);
}

// Sums each of 16 vectors; sum i becomes element i.
INLINE __m512 sum_each(const __m512 *x) {
  __m512 quads[4];
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i, x += 4) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44),
                                 _mm512_shuffle_f32x4(quads[0], quads[1], 0xee));
  const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44),
                                 _mm512_shuffle_f32x4(quads[2], quads[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Multiplies up to 4 queries at a time by 4 keys. Writes 4 scores where fewer keys are left.
INLINE void score(const float *q, int64_t num_queries, const float *keys, int64_t num_keys,
                  float *scores, int64_t size, int64_t H) {
  for (int64_t i = 0; i < num_keys; i += 4) {
    const float *key[4], *query[4];
    FOR_4(k) key[k] = keys + (i + k < num_keys ? i + k : num_keys - 1) * H;
    read_ahead(keys + (i + KEYS) * H, 4 * H);
    for (int64_t j = 0; j < num_queries; j += 4) {
      FOR_4(n) query[n] = q + (j + n < num_queries ? j + n : num_queries - 1) * H;
      __m512 sums[16];
      FOR_4(n) FOR_4(k) sums[4 * n + k] = _mm512_setzero_ps();
      for (int64_t h = 0; h < H; h += 16) {
        const __mmask16 mask = mask_of(H - h);
        __m512 elements[4];
        FOR_4(k) elements[k] = _mm512_maskz_loadu_ps(mask, key[k] + h);
        FOR_4(n) {
          const __m512 row = _mm512_maskz_loadu_ps(mask, query[n] + h);
          FOR_4(k) sums[4 * n + k] = _mm512_fmadd_ps(row, elements[k], sums[4 * n + k]);
        }
      }
      float results[16];
      _mm512_storeu_ps(results, sum_each(sums));
      for (int64_t n = 0; n < 4 && j + n < num_queries; ++n)
        memcpy(scores + (j + n) * size + i, results + 4 * n, 4 * sizeof(float));
    }
  }
}

// Adds values, but for those that may not be attended, times their weights to up to 4 outputs.
INLINE void add(float *const *outputs, const float *const *weights,
                const uint8_t *const *can_attend, const float *values, int64_t count, int64_t H) {
  for (int64_t h = 0; h < H; h += 64) {
    __m512 sums[4][4];
    __mmask16 masks[4];
    FOR_4(p) masks[p] = mask_of(H - h - 16 * p);
    FOR_4(n) FOR_4(p) sums[n][p] = _mm512_maskz_loadu_ps(masks[p], outputs[n] + h + 16 * p);
    for (int64_t i = 0; i < count; ++i) {
      __m512 parts[4];
      FOR_4(p) parts[p] = _mm512_maskz_loadu_ps(masks[p], values + i * H + h + 16 * p);
      FOR_4(n) {
        const __m512 weight = _mm512_set1_ps(weights[n][i]);
        const __mmask16 mask = !can_attend || can_attend[n][i] ? 0xffff : 0;
        FOR_4(p) sums[n][p] = _mm512_mask3_fmadd_ps(weight, parts[p], sums[n][p], mask);
      }
    }
    FOR_4(n) FOR_4(p) _mm512_mask_storeu_ps(outputs[n] + h + 16 * p, masks[p], sums[n][p]);
  }
}

// Turns scores into weights, not normalised, and returns their sum.
AVX512 static float weigh(float *scores, int64_t count, float factor) {
  __m512 highest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 x = _mm512_loadu_ps(scores + i);
    highest = _mm512_mask_max_ps(highest, mask_of(count - i), highest, x);
  }
  highest = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(scores + i), highest);
    const __m512 weights = exponential(_mm512_mul_ps(x, _mm512_set1_ps(factor)));
    total = _mm512_mask_add_ps(total, mask_of(count - i), total, weights);
    _mm512_storeu_ps(scores + i, weights);
  }
  return _mm512_reduce_add_ps(total);
}

static int64_t used_rows(const Attention *a, int64_t b) {
  const int64_t length = a->length[b] < a->S ? a->length[b] : a->S;
  return length > 0 ? length : 0;
}

INLINE __mmask16 attended(const uint8_t *can_attend, int64_t count) {
  uint8_t bytes[16] = {0};
  memcpy(bytes, can_attend, count < 16 ? count : 16);
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
  return _mm512_test_epi32_mask(wide, wide);
}

// Up to 8 queries of a key head.
AVX512 static void attend_queries(const void *work, int64_t piece) {
  const Attention *a = work;
  const int64_t H = a->H, M = a->M, T = a->T, head = piece / a->num_blocks;
  const int64_t first = piece % a->num_blocks * MAX_QUERIES, remaining = a->num_groups * T - first;
  const int64_t num_queries = remaining < MAX_QUERIES ? remaining : MAX_QUERIES;
  const int64_t b = head / a->K, length = used_rows(a, b), size = length + M + KEYS;
  const float *q = a->q + (head * a->num_groups * T + first) * H;
  const float *k = a->stored[0] + head * a->S * H, *v = a->stored[1] + head * a->S * H;
  const float *own_k = a->own[0] + head * M * H, *own_v = a->own[1] + head * M * H;
  float *all_scores = malloc(num_queries * (size + M + KEYS) * sizeof(float));
  if (!all_scores) abort();
  float *own_weights = all_scores + num_queries * size;
  float *outputs[MAX_QUERIES], totals[MAX_QUERIES];
  const float *weights[MAX_QUERIES], *weights_of_own[MAX_QUERIES];
  const uint8_t *can_attend[MAX_QUERIES];
  int64_t num_own = 0;  // keys up to the last that a query attends
  for (int64_t j = 0; j < MAX_QUERIES; ++j) {  // after the last, this again
    const int64_t query = j < num_queries ? j : num_queries - 1;
    const int64_t t = (first + query) % T, group = (first + query) / T;
    outputs[j] = a->out + (((b * T + t) * a->K + head % a->K) * a->num_groups + group) * H;
    can_attend[j] = a->can_attend + b * a->mask_size + t * M;
    weights[j] = all_scores + query * size;
    weights_of_own[j] = own_weights + query * (M + KEYS);
    for (int64_t m = num_own; m < M; ++m)
      if (can_attend[j][m]) num_own = m + 1;
  }
  score(q, num_queries, k, length, all_scores, size, H);
  score(q, num_queries, own_k, num_own, own_weights, M + KEYS, H);
  for (int64_t j = 0; j < num_queries; ++j) {
    float *scores = all_scores + j * size, *own_scores = own_weights + j * (M + KEYS);
    int64_t count = length;
    for (int64_t m = 0; m < num_own; m += 16) {
      const __mmask16 mask = attended(can_attend[j] + m, num_own - m);
      const __m512 path = _mm512_maskz_compress_ps(mask, _mm512_loadu_ps(own_scores + m));
      _mm512_storeu_ps(scores + count, path);
      count += _mm_popcnt_u32(mask);
    }
    totals[j] = weigh(scores, count, 1 / sqrtf(H));
    count = length;
    for (int64_t m = 0; m < num_own; m += 16) {
      const __mmask16 mask = attended(can_attend[j] + m, num_own - m);
      _mm512_storeu_ps(own_scores + m, _mm512_maskz_expandloadu_ps(mask, scores + count));
      count += _mm_popcnt_u32(mask);
    }
    memset(outputs[j], 0, H * sizeof(float));
  }
  for (int64_t i = 0; i < length; i += CHUNK) {
    const int64_t count = length - i < CHUNK ? length - i : CHUNK;
    for (int64_t j = 0; j < num_queries; j += 4) {
      const float *chunk[4];
      FOR_4(n) chunk[n] = weights[j + n] + i;
      add(outputs + j, chunk, NULL, v + i * H, count, H);
    }
  }
  for (int64_t j = 0; j < num_queries; j += 4)
    add(outputs + j, weights_of_own + j, can_attend + j, own_v, num_own, H);
  for (int64_t j = 0; j < num_queries; ++j) {
    const float factor = totals[j] == 0 ? 0 : 1 / totals[j];
    for (int64_t h = 0; h < H; ++h) outputs[j][h] *= factor;
  }
  free(all_scores);
}

XLA_FFI_Error *attend(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *q = argument(frame, 0), *k = argument(frame, 1), *v = argument(frame, 2);
  const XLA_FFI_Buffer *length = argument(frame, 3), *own_k = argument(frame, 4);
  const XLA_FFI_Buffer *own_v = argument(frame, 5), *can_attend = argument(frame, 6);
  const XLA_FFI_Buffer *out = frame->rets.rets[0];
  const int64_t B = k->dims[0], K = k->dims[1], S = k->dims[2], H = k->dims[3];
  const int64_t N = q->dims[1], T = q->dims[2], M = own_k->dims[2];
  const int64_t num_blocks = divide_up(N / K * T, MAX_QUERIES);
  const Attention attention = {
      q->data, {k->data, v->data}, {own_k->data, own_v->data}, length->data, can_attend->data,
      out->data, K, T, H, S, M, N / K, num_blocks,
      can_attend->dims[0] == 1 ? 0 : T * M};
  int64_t num_keys = B * M;
  for (int64_t b = 0; b < B; ++b) num_keys += used_rows(&attention, b);
  const int64_t max_helpers = num_keys * N * T * H / MIN_WORK;
  finish(begin(frame, attend_queries, &attention, B * K * num_blocks, max_helpers));
  return NULL;
}
