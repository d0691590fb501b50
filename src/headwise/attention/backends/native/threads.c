/* The threads, the choice of an instruction set, and the one function that Python calls. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "call.h"

#ifndef HEADWISE_SOURCE
#define HEADWISE_SOURCE "" /* hash of the sources, so that a binary older than they are is noticed */
#endif

enum { MOST_THREADS = 256, KEEP = 8 << 20 /* bytes of working memory that outlive a call */, SPINS = 200 };

#define EXPORT __attribute__((visibility("default")))
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

/* A thread begins with items of its own stretch, neighbours of one head; when they are done it takes others'. */
typedef struct {
    atomic_llong next;
    int64_t stop;
    char apart[48]; /* a cache line each */
} Stretch;

typedef struct {
    const Path *path;
    const Call *call;
    const Plan *plan;
    Stretch *stretch;
    int count;
    atomic_int failed;
} Job;

/* Runs a function in several threads at once and waits for them: GOMP_parallel's form. */
typedef void Parallel(void (*)(void *), void *, unsigned threads, unsigned flags);
typedef int Number(void); /* of the thread that asks, omp_get_thread_num's form */
static _Atomic(Parallel *) borrowed; /* PyTorch's own threads, which would else spin beside ours for milliseconds */
static _Atomic(Number *) number_of;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    Job *job;
    atomic_long turn;     /* counts jobs */
    atomic_int working;   /* workers inside of the job */
    int wanted, started;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; /* held by the caller whose job the pool has */
static pthread_key_t room_key;
static atomic_int forked; /* whether an OpenMP pool of this process may be one whose threads stayed behind in a parent */

static void free_room(void *x) {
    Room *room = x;
    free(room->memory);
    free(room);
}

/* Whether this process was forked and has not called exec since. Linux keeps the answer in the flags of the process
   (PF_FORKNOEXEC), and a process that was executed has others besides; where they cannot be read, or a sandbox shows 0,
   the answer is the safe one. */
static int forked_without_exec(void) {
    enum { FORKED_NO_EXEC = 0x40 };
    char text[512];
    unsigned flags = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    if (!file) return 1;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    const char *rest = strrchr(text, ')'); /* the name of the program ends there, and may hold anything */
    if (!rest || sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) return 1;
    return !flags || flags & FORKED_NO_EXEC;
}

/* In a child of fork there are no workers, and whoever held a lock is gone. */
static void after_fork(void) {
    pthread_mutex_init(&pool.lock, NULL);
    pthread_mutex_init(&busy, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.job = NULL;
    pool.started = 0;
    atomic_store(&pool.working, 0);
    atomic_store(&borrowed, NULL); /* theirs do not outlive a fork */
    atomic_store(&forked, 1);
}

/* When the library is loaded, not at the first call: PyTorch may run its threads and fork in between. If the fork came
   before, there was nobody to notice it, and the kernel of the system is asked. */
__attribute__((constructor)) static void begin(void) {
    pthread_key_create(&room_key, free_room);
    pthread_atfork(NULL, NULL, after_fork);
    atomic_store(&forked, forked_without_exec());
}

static Room *room_of(int64_t bytes) {
    Room *room = pthread_getspecific(room_key);
    if (!room) {
        room = calloc(1, sizeof *room);
        if (!room) return NULL;
        pthread_setspecific(room_key, room);
    }
    if (room->size < bytes) {
        free(room->memory);
        room->memory = malloc(bytes);
        room->size = room->memory ? bytes : 0;
    }
    room->head = -1;
    return room->memory ? room : NULL;
}

static void work(Job *job, int me) {
    Room *room = room_of(job->plan->room);
    if (!room) {
        atomic_store(&job->failed, 1);
        return;
    }
    for (int i = 0; i < job->count; i++) {
        Stretch *stretch = job->stretch + (me + i) % job->count;
        for (int64_t next; (next = atomic_fetch_add(&stretch->next, 1)) < stretch->stop;)
            job->path->item(job->call, job->plan, next, room);
    }
    if (room->size > KEEP) {
        free(room->memory);
        room->memory = NULL;
        room->size = 0;
    }
}

static void *worker(void *number) {
    int me = (int)(intptr_t)number;
    long seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.turn) == seen; i++) PAUSE();
        pthread_mutex_lock(&pool.lock);
        while (!pool.job || atomic_load(&pool.turn) == seen || me >= pool.wanted) {
            if (!pool.job) seen = atomic_load(&pool.turn);
            pthread_cond_wait(&pool.wake, &pool.lock);
        }
        seen = atomic_load(&pool.turn);
        Job *job = pool.job;
        atomic_fetch_add(&pool.working, 1);
        pthread_mutex_unlock(&pool.lock);
        work(job, me);
        pthread_mutex_lock(&pool.lock);
        atomic_fetch_sub(&pool.working, 1);
        pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

static void start_workers(int count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; pool.started < count; pool.started++)
        if (pthread_create(&thread, &attributes, worker, (void *)(intptr_t)(pool.started + 1))) break;
    pthread_attr_destroy(&attributes);
}

/* The caller works, too; workers that have not woken by the end are not waited for. */
static void run_together(Job *job) {
    pthread_mutex_lock(&pool.lock);
    start_workers(job->count - 1);
    pool.job = job;
    pool.wanted = job->count;
    atomic_fetch_add(&pool.turn, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(job, 0);
    for (int i = 0; i < SPINS && atomic_load(&pool.working); i++) PAUSE();
    pthread_mutex_lock(&pool.lock);
    pool.job = NULL;
    while (atomic_load(&pool.working)) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* By the thread's own number: what it had in its cache at the last call it is likely to need again. */
static void join(void *job) { work(job, atomic_load(&number_of)()); }

static int threads_for(const Call *call, const Plan *plan) {
    double numbers = (double)call->batch * call->kv_heads * call->keys * (call->dim + call->value_dim); /* of k and v */
    double work = numbers * (call->heads / call->kv_heads * call->queries + 8); /* reading one lasts as long as 8 */
    double worth = work / 150e3; /* multiply-adds that pay for waking a thread */
    int64_t count = call->threads;
    if (count > plan->items) count = plan->items;
    if (count > MOST_THREADS) count = MOST_THREADS;
    if (count > worth) count = (int64_t)worth;
    return count < 1 ? 1 : (int)count;
}

static void add_up(const Call *call, const Plan *plan) {
    int64_t group = call->heads / call->kv_heads, each = plan->row_blocks * plan->parts;
    for (int64_t head = 0; head < call->batch * call->kv_heads; head++)
        for (int64_t g = 0; g < group; g++) {
            const double *from = plan->item_sums + (head * each * group + g) * SUMS;
            for (int64_t x = 0; x < CLASS + call->class_count; x++) {
                double total = 0;
                for (int64_t i = 0; i < each; i++) total += from[i * group * SUMS + x];
                call->sums[x * call->batch * call->heads + head * group + g] = total;
            }
        }
}

float headwise_distances[2 * KEY_BLOCK + WIDEST_VECTOR];

__attribute__((constructor)) static void fill_distances(void) {
    for (int x = 0; x < 2 * KEY_BLOCK + WIDEST_VECTOR; x++)
        headwise_distances[x] = x < KEY_BLOCK ? KEY_BLOCK - x : x - KEY_BLOCK;
}

/* Which instruction sets this binary has and this processor can run, the fastest first; then NULL. */
static const Path *paths[4];

#if defined(__x86_64__)
/* What both vector paths are compiled with besides their own instructions. Older compilers know no "f16c" by name. */
static int has_fma_and_f16c(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

/* Once: asking the processor takes longer than a short call where the machine is a virtual one. */
__attribute__((constructor)) static void find_paths(void) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int common = has_fma_and_f16c();
    if (common && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        paths[count++] = &headwise_avx512;
    if (common && __builtin_cpu_supports("avx2")) paths[count++] = &headwise_avx2;
#elif defined(__aarch64__)
    paths[count++] = &headwise_neon;
#endif
    paths[count++] = &headwise_plain;
}

static const Path *path_at(int index) { return index >= 0 && index < 3 ? paths[index] : NULL; }

EXPORT const char *headwise_path(int index) { return path_at(index) ? path_at(index)->name : NULL; }

EXPORT const char *headwise_source(void) { return HEADWISE_SOURCE; }

/* Borrow threads from this process's GOMP_parallel; NULL: use our own. A forked process always uses our own: GNU OpenMP
   would wait for threads that only its parent has. Gives whether they are borrowed. */
EXPORT int headwise_borrow(Parallel *parallel, Number *number) {
    if (atomic_load(&forked)) parallel = NULL;
    atomic_store(&number_of, number);
    atomic_store(&borrowed, parallel);
    return parallel != NULL;
}

/* Run a call on the path of that index. Gives 0, 1 where there is no such path, 2 where memory ran out. */
EXPORT int headwise_run(const Call *call, int index) {
    const Path *path = path_at(index);
    if (!path) return 1;
    Plan plan;
    path->plan(call, &plan);
    int64_t group = call->heads / call->kv_heads, failed = 0;
    int64_t sums = call->sums ? plan.items * group * SUMS * sizeof(double) : 0, parts = 0;
    if (plan.parts > 1) parts = plan.items * plan.part_floats * sizeof(float);
    plan.item_sums = calloc(1, sums + 1);
    plan.part = malloc(parts + 1);
    plan.first = NULL;
    int marks = call->sums && call->mask;
    if (marks && (plan.first = malloc((call->batch + 1) * sizeof(int64_t))))
        for (int64_t b = 0; b < call->batch; b++) plan.first[b] = path->first_key(call, b);
    plan.low = plan.high = NULL;
    int shared = plan.items && call->mask && !call->mask_stride[1] && !call->mask_stride[2];
    Call unmasked;
    if (shared && (plan.low = malloc(2 * call->batch * sizeof(int64_t)))) {
        plan.high = plan.low + call->batch;
        int64_t solid = 0;
        for (int64_t b = 0; b < call->batch; b++) solid += path->span(call, b, plan.low + b, plan.high + b);
        if (solid == call->batch) { /* padding: from here on, its ends say it all */
            unmasked = *call;
            unmasked.mask = NULL;
            call = &unmasked;
        }
    }
    if (plan.item_sums && plan.part && (plan.first || !marks)) {
        Job job = {.path = path, .call = call, .plan = &plan, .count = threads_for(call, &plan)};
        Parallel *parallel = atomic_load(&borrowed);
        int alone = job.count == 1 || (!parallel && pthread_mutex_trylock(&busy));
        if (alone) job.count = 1;
        Stretch stretch[MOST_THREADS];
        job.stretch = stretch;
        for (int i = 0; i < job.count; i++) {
            atomic_init(&stretch[i].next, plan.items * i / job.count);
            stretch[i].stop = plan.items * (i + 1) / job.count;
        }
        if (alone) {
            work(&job, 0);
        } else if (parallel) {
            parallel(join, &job, job.count, 0);
        } else {
            run_together(&job);
            pthread_mutex_unlock(&busy);
        }
        failed = atomic_load(&job.failed);
        for (int64_t i = 0; plan.parts > 1 && !failed && i < call->batch * call->kv_heads; i++) path->merge(call, &plan, i);
        if (call->sums && !failed) add_up(call, &plan);
    } else {
        failed = 1;
    }
    free(plan.item_sums);
    free(plan.part);
    free(plan.first);
    free(plan.low);
    return failed ? 2 : 0;
}
