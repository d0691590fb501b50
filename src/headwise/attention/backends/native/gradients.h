/* What the backward pass takes besides Call, whose out, gates and statistics it does not use. library.py packs it with
   the `struct` module: every field is 8 bytes wide. */
#ifndef HEADWISE_GRADIENTS_H
#define HEADWISE_GRADIENTS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int64_t out_stride[4], grad_out_stride[4]; /* in elements */
    const char *out, *grad_out;                /* (batch, heads, queries, value_dim): the output before gates */
    const float *lse;                          /* (batch, heads, queries), of the forward pass */
    char *dq;                                  /* (batch, queries, heads, dim), written, as are */
    char *dk;                                  /* (batch, keys, kv_heads, dim) */
    char *dv;                                  /* (batch, keys, kv_heads, value_dim) */
    float *delta;                              /* (batch, heads, queries) grad_out . out; NULL: not wanted */
} Gradients;

enum { GRADIENTS_FIELDS = 15 };

#define FIELD(name, index) _Static_assert(offsetof(Gradients, name) == 8 * (index), "Gradients." #name " has moved")
FIELD(out_stride, 0);
FIELD(grad_out_stride, 4);
FIELD(out, 8);
FIELD(grad_out, 9);
FIELD(lse, 10);
FIELD(dq, 11);
FIELD(dk, 12);
FIELD(dv, 13);
FIELD(delta, 14);
#undef FIELD
_Static_assert(sizeof(Gradients) == 8 * GRADIENTS_FIELDS, "a field of Gradients is missing above");

#endif
