/* What the backward pass takes besides Call, whose out, gates and statistics it does not use. library.py packs it with
   the `struct` module: every field is 8 bytes wide. */
#ifndef HEADWISE_GRADIENTS_H
#define HEADWISE_GRADIENTS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int64_t out_stride[4], grad_out_stride[4]; /* in elements */
    int64_t dmask_stride[4];                   /* 0: summed over this axis; never over keys, whose stride is 1 */
    const char *out, *grad_out;                /* (batch, heads, queries, value_dim): the output before gates */
    const float *lse;                          /* (batch, heads, queries), of the forward pass */
    char *dq;                                  /* (batch, queries, heads, dim), written, as are */
    char *dk;                                  /* (batch, keys, kv_heads, dim) */
    char *dv;                                  /* (batch, keys, kv_heads, value_dim) */
    float *delta;                              /* (batch, heads, queries) grad_out . out; NULL: not wanted */
    float *dmask;                              /* added to: the gradient of a float mask; NULL: not wanted */
} Gradients;

enum { GRADIENTS_FIELDS = 20 };

#define FIELD(name, index) _Static_assert(offsetof(Gradients, name) == 8 * (index), "Gradients." #name " has moved")
FIELD(out_stride, 0);
FIELD(grad_out_stride, 4);
FIELD(dmask_stride, 8);
FIELD(out, 12);
FIELD(grad_out, 13);
FIELD(lse, 14);
FIELD(dq, 15);
FIELD(dk, 16);
FIELD(dv, 17);
FIELD(delta, 18);
FIELD(dmask, 19);
#undef FIELD
_Static_assert(sizeof(Gradients) == 8 * GRADIENTS_FIELDS, "a field of Gradients is missing above");

#endif
