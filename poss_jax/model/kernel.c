// Products of float rows with tiled int8 weights (AVX-512 VNNI); see kernel.py.
//
// Rows become uint8 limbs, as linear.py says. A tile holds 32 outputs: for every four elements of a
// row, the 32 x 4 values that meet them. So a tile is read from end to end, once for up to 12 limbs
// of rows, whose sums stay in registers. Threads of XLA's pool take one tile after the other; the
// caller takes part and waits only for tiles that others have begun, so it does not matter when, or
// if, the pool runs its tasks.

#include <immintrin.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

enum { TILE = 32, MAX_LIMBS = 12, AHEAD = 2048 };

#define AVX512 __attribute__((target("avx512f,avx512vnni")))
#define FOR_LIMBS _Pragma("GCC unroll 12") for (int limb = 0; limb < num_limbs; ++limb)

typedef struct {
  const float *rows;        // [num_rows in_dim]
  const int8_t *values;     // [num_tiles in_dim / 4, 32, 4]
  const int32_t *sums;      // [out_dim] of each output's values
  const float *scales;      // [out_dim]
  float *out;               // [num_rows out_dim]
  int64_t num_rows, num_limbs, in_dim, out_dim, num_tiles;
  float *row_scales;        // [num_rows]
  uint8_t *limbs;           // [num_rows num_limbs in_dim], the largest limb of a row first
  atomic_long next_tile, tiles_done, users;
  atomic_bool is_split;
} Product;

// Writes a row as limbs plus 128, times a scale, which it returns.
AVX512 static float split(const float *row, uint8_t *limbs, int64_t in_dim, int num_limbs) {
  int32_t highest_bits = 0;  // of an absolute value; NaN is above all numbers
  for (int64_t i = 0; i < in_dim; ++i) {
    int32_t bits;
    memcpy(&bits, row + i, 4);
    bits &= INT32_MAX;
    highest_bits = bits > highest_bits ? bits : highest_bits;
  }
  float highest;
  memcpy(&highest, &highest_bits, 4);
  const float scale = highest == 0 ? 1 : highest * (1.0f / 127);
  float factor = 1 / scale;
  int32_t offset = 128;
  for (int limb = 1; limb < num_limbs; ++limb) factor *= 256, offset = offset * 256 + 128;
  for (int64_t i = 0; i < in_dim; i += 16) {
    const __mmask16 mask = in_dim - i < 16 ? (1 << (in_dim - i)) - 1 : 0xffff;
    const __m512 elements = _mm512_maskz_loadu_ps(mask, row + i);
    __m512i fixed_point = _mm512_cvtps_epi32(_mm512_mul_ps(elements, _mm512_set1_ps(factor)));
    fixed_point = _mm512_add_epi32(fixed_point, _mm512_set1_epi32(offset));
    for (int limb = num_limbs - 1; limb >= 0; --limb) {
      _mm512_mask_cvtepi32_storeu_epi8(limbs + limb * in_dim + i, mask, fixed_point);
      fixed_point = _mm512_srai_epi32(fixed_point, 8);
    }
  }
  return scale;
}

__attribute__((target("avx512f,avx512vnni"), always_inline)) static inline void multiply(
    const uint8_t *limbs, const int8_t *tile, int32_t *sums, int64_t in_dim, const int num_limbs) {
  __m512i low[MAX_LIMBS], high[MAX_LIMBS];
  FOR_LIMBS low[limb] = high[limb] = _mm512_setzero_si512();
  for (int64_t i = 0; i < in_dim; i += 4, tile += 4 * TILE) {
    _mm_prefetch((const char *)tile + AHEAD, _MM_HINT_T0);
    _mm_prefetch((const char *)tile + AHEAD + 64, _MM_HINT_T0);
    const __m512i low_values = _mm512_loadu_si512(tile);
    const __m512i high_values = _mm512_loadu_si512(tile + 2 * TILE);
    FOR_LIMBS {
      int32_t elements;
      memcpy(&elements, limbs + limb * in_dim + i, 4);
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
    return multiply(limbs, tile, sums, in_dim, n);

AVX512 static void multiply_limbs(const uint8_t *limbs, const int8_t *tile, int32_t *sums,
                                  int64_t in_dim, int64_t num_limbs) {
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
  for (int64_t row = 0; row < product->num_rows;) {
    int64_t rows = product->num_rows - row;
    if (rows > MAX_LIMBS / num_limbs) rows = MAX_LIMBS / num_limbs;
    multiply_limbs(product->limbs + row * num_limbs * in_dim,
                   product->values + tile * TILE * in_dim, sums, in_dim, rows * num_limbs);
    for (const int32_t *next = sums; rows--; next += num_limbs * TILE)
      join(product, next, row++, tile);
  }
}

static void release(Product *product) {
  if (atomic_fetch_sub(&product->users, 1) == 1) free(product);
}

static void multiply_tiles(void *data) {
  Product *product = data;
  while (!atomic_load(&product->is_split)) _mm_pause();
  for (;;) {
    const int64_t tile = atomic_fetch_add(&product->next_tile, 1);
    if (tile >= product->num_tiles) break;
    multiply_tile(product, tile);
    atomic_fetch_add(&product->tiles_done, 1);
  }
  release(product);
}

static int failed(const XLA_FFI_Api *api, XLA_FFI_Error *error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args args = {sizeof args, NULL, error};
  api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

XLA_FFI_Error *int8_products(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {  // asked at registration
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
  }
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, *out = frame->rets.rets[0];
  const int64_t num_limbs = *(const int64_t *)((XLA_FFI_Scalar *)frame->attrs.attrs[0])->value;
  const int64_t num_rows = args[0]->dims[0], in_dim = args[0]->dims[1];
  Product *product = malloc(sizeof *product + num_rows * (sizeof(float) + num_limbs * in_dim));
  if (!product) abort();
  *product = (Product){args[0]->data, args[1]->data, args[2]->data, args[3]->data, out->data,
                       num_rows, num_limbs, in_dim, out->dims[1], out->dims[1] / TILE,
                       (float *)(product + 1), (uint8_t *)(product + 1) + num_rows * sizeof(float)};

  int64_t num_threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args pool = {sizeof pool, NULL, frame->ctx, &num_threads};
  if (failed(frame->api, frame->api->XLA_FFI_ThreadPool_NumThreads(&pool))) num_threads = 1;
  const int64_t num_users = num_threads < product->num_tiles ? num_threads : product->num_tiles;
  const int64_t num_helpers = num_users > 1 ? num_users - 1 : 0;
  atomic_init(&product->users, num_helpers + 2);
  for (int64_t i = 0; i < num_helpers; ++i) {  // they wake up while rows become limbs
    XLA_FFI_ThreadPool_Schedule_Args task = {sizeof task, NULL, frame->ctx, multiply_tiles, product};
    if (failed(frame->api, frame->api->XLA_FFI_ThreadPool_Schedule(&task))) release(product);
  }
  for (int64_t row = 0; row < num_rows; ++row)
    product->row_scales[row] = split(product->rows + row * in_dim,
                                     product->limbs + row * num_limbs * in_dim, in_dim, num_limbs);
  atomic_store(&product->is_split, true);
  multiply_tiles(product);
  while (atomic_load(&product->tiles_done) < product->num_tiles) _mm_pause();
  release(product);
  return NULL;
}
