/* What Python calls: the choice of an instruction set, and one attention call from beginning to end. */
#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "call.h"
#include "cpu.h"
#include "plan.h"
#include "platform.h"
#include "threads.h"

#ifndef HEADWISE_SOURCE
#define HEADWISE_SOURCE "" /* hash of the sources, so that Python notices a stale binary */
#endif

enum { OK, NO_SUCH_PATH, OUT_OF_MEMORY, DECLINED }; /* returned by headwise_run and headwise_backward */

/* ---- at load time ---- */

float headwise_distances[2 * KEY_BLOCK + MAX_LANES];

__attribute__((constructor)) static void fill_distances(void) {
    for (int x = 0; x < 2 * KEY_BLOCK + MAX_LANES; x++)
        headwise_distances[x] = x < KEY_BLOCK ? KEY_BLOCK - x : x - KEY_BLOCK;
}

/* The instruction sets that this binary has and this machine can run, the fastest first; then NULL. */
static const Path *paths[4];

/* Once: in a virtual machine, asking the processor takes longer than a short call. */
__attribute__((constructor)) static void find_paths(void) {
    int count = 0;
#if defined(__x86_64__)
    CpuFeatures cpu = read_cpu_features();
    if (can_run_avx512(&cpu)) paths[count++] = &headwise_avx512;
    if (can_run_avx2(&cpu)) paths[count++] = &headwise_avx2;
#elif defined(__aarch64__)
    paths[count++] = &headwise_neon;
#endif
    paths[count++] = &headwise_plain;
}

/* The names of all that this binary has: what wheels of this platform can run at best. */
EXPORT const char *headwise_build(void) {
#if defined(__x86_64__)
    return "avx512 avx2 plain";
#elif defined(__aarch64__)
    return "neon plain";
#else
    return "plain";
#endif
}

static const Path *path_at(int index) { return index >= 0 && index < 3 ? paths[index] : NULL; }

EXPORT const char *headwise_path(int index) { return path_at(index) ? path_at(index)->name : NULL; }

EXPORT const char *headwise_source(void) { return HEADWISE_SOURCE; }

/* What library.py packs and allocates must agree with these: the bytes of Call's first part and of all of it,
   MAX_CLASSES, MAX_STRONGEST, the bytes of Gradients; and the names of the columns of sums and rows. */
EXPORT const int64_t headwise_layout[5] = {8 * CALL_POINTERS, sizeof(Call), MAX_CLASSES, MAX_STRONGEST,
                                           sizeof(Gradients)};

#define STATISTIC_NAME(id, name) name " "
EXPORT const char *headwise_statistics(void) { return STATISTICS(STATISTIC_NAME); }
EXPORT const char *headwise_row_sums(void) { return ROW_SUMS(STATISTIC_NAME); }

EXPORT int headwise_borrow(OmpParallel *parallel, OmpThreadNumber *thread_number) {
    return headwise_use_openmp(parallel, thread_number);
}

/* ---- a call ---- */

/* Pointers are not checked: those of empty tensors are NULL. */
static void check_preconditions(const Call *call) {
    assert(call->kv_heads > 0 && call->heads % call->kv_heads == 0);
    assert(call->dtype >= F32 && call->dtype < BOOL8 && call->mask_dtype >= F32 && call->mask_dtype <= BOOL8);
    assert(call->out_stride[3] == 1);
    assert(call->class_count >= 0 && call->class_count <= MAX_CLASSES);
    assert(call->strongest_count >= 0 && call->strongest_count <= MAX_STRONGEST);
    assert(call->sums || !call->rows);
    (void)call; /* with NDEBUG */
}

/* Allocate what the items of a plan write, and look at the mask once per sequence. Returns 1 where memory ran out;
   release_plan frees what was allocated. */
static int prepare_plan(const Path *path, const Call *call, Plan *plan) {
    int64_t group = call->heads / call->kv_heads;
    plan->item_sums = calloc(1, call->sums ? plan->items * group * MAX_STATS * sizeof(double) + 1 : 1);
    plan->partial = malloc(plan->parts > 1 ? plan->items * plan->partial_floats * sizeof(float) : 1);
    if (!plan->item_sums || !plan->partial) return 1;
    for (int64_t i = 0; call->sums && i < plan->items * group; i++)
        plan->item_sums[i * MAX_STATS + STAT_MAX_LOGIT] = -INFINITY;
    if (call->sums && (call->mask || call->starts || call->start > 0)) {
        plan->first_key = malloc((call->batch + 1) * sizeof(int64_t));
        if (!plan->first_key) return 1;
        for (int64_t b = 0; b < call->batch; b++) plan->first_key[b] = path->first_visible_key(call, b);
    }
    return 0;
}

static void release_plan(Plan *plan) {
    free(plan->item_sums);
    free(plan->partial);
    free(plan->first_key);
    free(plan->low);
}

/* For a mask that all rows share, set the plan's low and high. Returns whether they replace it, as for padding. */
static int find_visible_spans(const Path *path, const Call *call, Plan *plan) {
    if (!plan->items || !call->mask || call->mask_stride[1] || call->mask_stride[2]) return 0;
    plan->low = malloc(2 * call->batch * sizeof(int64_t));
    if (!plan->low) return 0; /* it works without */
    plan->high = plan->low + call->batch;
    int64_t replaced = 0;
    for (int64_t b = 0; b < call->batch; b++) replaced += path->visible_span(call, b, plan->low + b, plan->high + b);
    return replaced == call->batch;
}

/* Call.sums from the statistics of the items. */
static void add_up_sums(const Call *call, const Plan *plan) {
    int64_t group = call->heads / call->kv_heads, items = plan->row_blocks * plan->parts; /* per KV head */
    for (int64_t kv_head = 0; kv_head < call->batch * call->kv_heads; kv_head++)
        for (int64_t g = 0; g < group; g++) {
            const double *from = plan->item_sums + (kv_head * items * group + g) * MAX_STATS;
            for (int64_t column = 0; column < STAT_CLASS + call->class_count; column++) {
                double total = column == STAT_MAX_LOGIT ? -INFINITY : 0;
                for (int64_t i = 0; i < items; i++) {
                    double x = from[i * group * MAX_STATS + column];
                    total = column == STAT_MAX_LOGIT ? max_or_nan(total, x) : total + x;
                }
                call->sums[column * call->batch * call->heads + kv_head * group + g] = total;
            }
        }
}

/* Run a call with the instruction set of that index. */
EXPORT int headwise_run(const Call *call, int index) {
    const Path *path = path_at(index);
    if (!path) return NO_SUCH_PATH;
    check_preconditions(call);
    Plan plan;
    path->make_plan(call, &plan);
    int failed = prepare_plan(path, call, &plan);
    Call unmasked;
    if (!failed && find_visible_spans(path, call, &plan)) {
        unmasked = *call;
        unmasked.mask = NULL;
        call = &unmasked;
    }
    if (!failed) failed = headwise_run_items(path->run_item, call, &plan);
    if (!failed && plan.parts > 1)
        for (int64_t i = 0; i < call->batch * call->kv_heads; i++) path->merge_parts(call, &plan, i);
    if (!failed && call->sums) add_up_sums(call, &plan);
    release_plan(&plan);
    return failed ? OUT_OF_MEMORY : OK;
}

/* Compute the gradients of a call whose gates and statistics are NULL, with the instruction set of that index. DECLINED
   where some number is not finite or so large that single precision may fail: what was written is then meaningless. */
EXPORT int headwise_backward(const Call *call, const Gradients *gradients, int index) {
    const Path *path = path_at(index);
    if (!path) return NO_SUCH_PATH;
    assert(!call->gates && !call->sums && !call->rows && !call->class_count && !call->strongest_count);
    assert(!gradients->dmask || (call->mask && call->softcap == 0 && gradients->dmask_stride[3] == 1));
    int declined = 0;
    Plan plan;
    path->backward->make_plan(call, gradients, &plan);
    plan.declined = &declined;
    int64_t partials = call->batch * call->kv_heads * plan.parts;
    if (plan.parts > 1) plan.partial = malloc(partials * plan.partial_floats * sizeof(float) + 1);
    int failed = plan.parts > 1 && !plan.partial;
    Call unmasked = *call;
    if (!failed && find_visible_spans(path, call, &plan)) unmasked.mask = NULL;
    if (!failed) failed = headwise_run_items(path->backward->run_item, &unmasked, &plan);
    if (!failed && !declined && plan.parts > 1) {
        Plan merging = plan;
        merging.runs = call->batch * call->kv_heads * plan.row_blocks;
        merging.scratch_bytes = 1;
        failed = headwise_run_items(path->backward->merge_item, &unmasked, &merging);
    }
    release_plan(&plan);
    return failed ? OUT_OF_MEMORY : declined ? DECLINED : OK;
}
