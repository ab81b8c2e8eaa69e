// Products of uint8 rows with tiled int8 weights, summed in int32 (AVX-512 VNNI); see kernel.py.
//
// A tile holds 32 outputs: for every four elements of a row, the 32 x 4 values that meet them. So a
// tile is read from end to end, once for up to 12 rows, whose sums stay in registers. Threads of
// XLA's pool take one tile after the other; the caller takes part and waits only for tiles that
// others have begun, so it does not matter when, or if, the pool runs its tasks.

#include <immintrin.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

enum { TILE = 32, MAX_ROWS = 12, AHEAD = 2048 };

#define FOR_ROWS _Pragma("GCC unroll 12") for (int row = 0; row < num_rows; ++row)

__attribute__((target("avx512f,avx512vnni"), always_inline)) static inline void multiply(
    const uint8_t *rows, const int8_t *tile, int32_t *sums, int64_t in_dim, int64_t out_dim,
    const int num_rows) {
  __m512i low[MAX_ROWS], high[MAX_ROWS];
  FOR_ROWS low[row] = high[row] = _mm512_setzero_si512();
  for (int64_t i = 0; i < in_dim; i += 4, tile += 4 * TILE) {
    _mm_prefetch((const char *)tile + AHEAD, _MM_HINT_T0);
    _mm_prefetch((const char *)tile + AHEAD + 64, _MM_HINT_T0);
    const __m512i low_values = _mm512_loadu_si512(tile);
    const __m512i high_values = _mm512_loadu_si512(tile + 2 * TILE);
    FOR_ROWS {
      int32_t elements;
      memcpy(&elements, rows + row * in_dim + i, 4);
      const __m512i repeated = _mm512_set1_epi32(elements);
      low[row] = _mm512_dpbusd_epi32(low[row], repeated, low_values);
      high[row] = _mm512_dpbusd_epi32(high[row], repeated, high_values);
    }
  }
  FOR_ROWS {
    _mm512_storeu_si512(sums + row * out_dim, low[row]);
    _mm512_storeu_si512(sums + row * out_dim + TILE / 2, high[row]);
  }
}

// One copy of the loops for every number of rows.
#define CASE(n) \
  case n:       \
    return multiply(rows, tile, sums, in_dim, out_dim, n);

__attribute__((target("avx512f,avx512vnni"))) static void multiply_rows(
    const uint8_t *rows, const int8_t *tile, int32_t *sums, int64_t in_dim, int64_t out_dim,
    int64_t num_rows) {
  switch (num_rows) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
}

typedef struct {
  const uint8_t *rows;    // [num_rows in_dim]
  const int8_t *weight;   // [num_tiles in_dim / 4, 32, 4]
  int32_t *sums;          // [num_rows out_dim]
  int64_t num_rows, in_dim, out_dim, num_tiles;
  atomic_long next_tile, tiles_done, users;
} Product;

static void release(Product *product) {
  if (atomic_fetch_sub(&product->users, 1) == 1) free(product);
}

static void multiply_tiles(void *data) {
  Product *product = data;
  const int64_t in_dim = product->in_dim, out_dim = product->out_dim;
  for (;;) {
    const int64_t tile = atomic_fetch_add(&product->next_tile, 1);
    if (tile >= product->num_tiles) break;
    for (int64_t row = 0; row < product->num_rows; row += MAX_ROWS) {
      const int64_t remaining = product->num_rows - row;
      multiply_rows(product->rows + row * in_dim, product->weight + tile * TILE * in_dim,
                    product->sums + row * out_dim + tile * TILE, in_dim, out_dim,
                    remaining < MAX_ROWS ? remaining : MAX_ROWS);
    }
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
  const XLA_FFI_Buffer *rows = frame->args.args[0], *weight = frame->args.args[1];
  const XLA_FFI_Buffer *sums = frame->rets.rets[0];
  Product *product = malloc(sizeof *product);
  if (!product) abort();
  product->rows = rows->data;
  product->weight = weight->data;
  product->sums = sums->data;
  product->num_rows = rows->dims[0];
  product->in_dim = rows->dims[1];
  product->out_dim = sums->dims[1];
  const int64_t num_tiles = product->num_tiles = product->out_dim / TILE;
  atomic_init(&product->next_tile, 0);
  atomic_init(&product->tiles_done, 0);

  int64_t num_threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args pool = {sizeof pool, NULL, frame->ctx, &num_threads};
  if (failed(frame->api, frame->api->XLA_FFI_ThreadPool_NumThreads(&pool))) num_threads = 1;
  const int64_t num_users = num_threads < num_tiles ? num_threads : num_tiles;
  const int64_t num_helpers = num_users > 1 ? num_users - 1 : 0;
  atomic_init(&product->users, num_helpers + 2);
  for (int64_t i = 0; i < num_helpers; ++i) {
    XLA_FFI_ThreadPool_Schedule_Args task = {sizeof task, NULL, frame->ctx, multiply_tiles, product};
    if (failed(frame->api, frame->api->XLA_FFI_ThreadPool_Schedule(&task))) release(product);
  }
  multiply_tiles(product);
  while (atomic_load(&product->tiles_done) < num_tiles) _mm_pause();
  release(product);
  return NULL;
}
