/* The threads: a pool of our own, or those of PyTorch's OpenMP runtime; and the scratch memory of each thread. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_THREADS = 256, CACHE_LINE = 64, SPINS = 200 };
enum { MAX_CACHED_SCRATCH = 8 << 20 /* bytes: larger scratch memory is freed after the call */ };

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

/* A thread first runs the items of its own range, which are neighbours of one head, then helps with the others'. */
typedef struct {
    _Alignas(CACHE_LINE) atomic_llong next; /* no two threads count in the same cache line */
    int64_t end;
} Range;
_Static_assert(sizeof(Range) == CACHE_LINE, "one cache line per range");

typedef struct {
    RunItem *run_item;
    const Call *call;
    const Plan *plan;
    Range *ranges; /* (threads) */
    int threads;
    atomic_int failed;
} Job;

/* PyTorch's own threads are used where possible: after each operator they spin for milliseconds, on the cores that ours
   would need. */
static _Atomic(OmpParallel *) omp_parallel;
static _Atomic(OmpThreadNumber *) omp_thread_number;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    Job *job;               /* NULL: none */
    atomic_long generation; /* counts jobs */
    atomic_int working;     /* workers inside of the job */
    int threads;            /* of the job: workers with a higher number sleep on */
    int started;            /* workers; numbered from 1, the caller is 0 */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static pthread_mutex_t pool_in_use = PTHREAD_MUTEX_INITIALIZER; /* held by the caller whose job the pool runs */
static pthread_key_t scratch_key;
static atomic_int forked; /* whether the OpenMP threads of this process may be ones that exist only in a parent */

/* ---- processes ---- */

/* Whether this process was forked and has not called exec since. Linux keeps the answer in the flags of the process
   (PF_FORKNOEXEC); a process that called exec has other flags. Where they cannot be read, or a sandbox shows 0, the
   answer is the safe one. */
static int forked_without_exec(void) {
    enum { PF_FORKNOEXEC = 0x40 };
    char text[512];
    unsigned flags = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    if (!file) return 1;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    const char *rest = strrchr(text, ')'); /* end of the program's name, which may contain anything */
    if (!rest || sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) return 1;
    return !flags || flags & PF_FORKNOEXEC;
}

/* The child of a fork has no workers, and whoever held a lock is gone. */
static void after_fork(void) {
    pthread_mutex_init(&pool.lock, NULL);
    pthread_mutex_init(&pool_in_use, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.job = NULL;
    pool.started = 0;
    atomic_store(&pool.working, 0);
    atomic_store(&omp_parallel, NULL); /* its threads did not survive either */
    atomic_store(&forked, 1);
}

static void free_scratch(void *x) {
    Scratch *scratch = x;
    free(scratch->memory);
    free(scratch);
}

/* When the library is loaded, not at the first call: PyTorch may run its threads and fork in between. Nobody noticed a
   fork from before; the operating system is asked for it. */
__attribute__((constructor)) static void watch_forks(void) {
    pthread_key_create(&scratch_key, free_scratch);
    pthread_atfork(NULL, NULL, after_fork);
    atomic_store(&forked, forked_without_exec());
}

int headwise_use_openmp(OmpParallel *parallel, OmpThreadNumber *thread_number) {
    if (atomic_load(&forked)) parallel = NULL;
    atomic_store(&omp_thread_number, thread_number);
    atomic_store(&omp_parallel, parallel);
    return parallel != NULL;
}

/* ---- one thread ---- */

/* This thread's scratch memory of at least so many bytes, without packed keys; NULL where memory ran out. */
static Scratch *get_scratch(int64_t bytes) {
    Scratch *scratch = pthread_getspecific(scratch_key);
    if (!scratch) {
        scratch = calloc(1, sizeof *scratch);
        if (!scratch) return NULL;
        pthread_setspecific(scratch_key, scratch);
    }
    if (scratch->size < bytes) {
        void *memory = NULL;
        free(scratch->memory);
        if (posix_memalign(&memory, SCRATCH_ALIGN, bytes)) memory = NULL;
        scratch->memory = memory;
        scratch->size = memory ? bytes : 0;
    }
    scratch->packed_head = -1;
    return scratch->memory ? scratch : NULL;
}

static void work(Job *job, int thread) {
    Scratch *scratch = get_scratch(job->plan->scratch_bytes);
    if (!scratch) {
        atomic_store(&job->failed, 1);
        return;
    }
    for (int i = 0; i < job->threads; i++) {
        Range *range = job->ranges + (thread + i) % job->threads;
        for (int64_t next; (next = atomic_fetch_add(&range->next, 1)) < range->end;)
            job->run_item(job->call, job->plan, next, scratch);
    }
    if (scratch->size > MAX_CACHED_SCRATCH) {
        free(scratch->memory);
        scratch->memory = NULL;
        scratch->size = 0;
    }
}

/* By the thread's own number: what it cached in the last call it is likely to need again. */
static void work_in_openmp(void *job) { work(job, atomic_load(&omp_thread_number)()); }

/* ---- our own pool ---- */

static void *worker(void *number) {
    int thread = (int)(intptr_t)number;
    long seen = 0; /* the last generation that this worker need not look at */
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.generation) == seen; i++) PAUSE();
        pthread_mutex_lock(&pool.lock);
        while (!pool.job || atomic_load(&pool.generation) == seen || thread >= pool.threads) {
            if (!pool.job) seen = atomic_load(&pool.generation);
            pthread_cond_wait(&pool.wake, &pool.lock);
        }
        seen = atomic_load(&pool.generation);
        Job *job = pool.job;
        atomic_fetch_add(&pool.working, 1);
        pthread_mutex_unlock(&pool.lock);
        work(job, thread);
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

/* The caller works as thread 0; workers that have not woken by the time it is done are not waited for. */
static void run_in_pool(Job *job) {
    pthread_mutex_lock(&pool.lock);
    start_workers(job->threads - 1);
    pool.job = job;
    pool.threads = job->threads;
    atomic_fetch_add(&pool.generation, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(job, 0);
    for (int i = 0; i < SPINS && atomic_load(&pool.working); i++) PAUSE();
    pthread_mutex_lock(&pool.lock);
    pool.job = NULL;
    while (atomic_load(&pool.working)) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* ---- one call ---- */

/* As many threads as were asked for, but no more than pay. */
static int choose_threads(const Call *call, const Plan *plan) {
    double elements = (double)call->batch * call->kv_heads * call->keys * (call->dim + call->value_dim); /* k and v */
    double work = elements * (call->heads / call->kv_heads * call->queries + 8); /* reading one costs as much as 8 */
    double worth = work / 150e3; /* multiply-adds that pay for waking a thread */
    int64_t count = call->threads;
    if (count > plan->runs) count = plan->runs;
    if (count > MAX_THREADS) count = MAX_THREADS;
    if (count > worth) count = (int64_t)worth;
    return count < 1 ? 1 : (int)count;
}

int headwise_run_items(RunItem *run_item, const Call *call, const Plan *plan) {
    Range ranges[MAX_THREADS];
    Job job = {.run_item = run_item, .call = call, .plan = plan, .ranges = ranges};
    job.threads = choose_threads(call, plan);
    OmpParallel *parallel = atomic_load(&omp_parallel);
    int alone = job.threads == 1 || (!parallel && pthread_mutex_trylock(&pool_in_use));
    if (alone) job.threads = 1;
    for (int i = 0; i < job.threads; i++) {
        atomic_init(&ranges[i].next, plan->runs * i / job.threads);
        ranges[i].end = plan->runs * (i + 1) / job.threads;
    }
    if (alone) {
        work(&job, 0);
    } else if (parallel) {
        parallel(work_in_openmp, &job, job.threads, 0);
    } else {
        run_in_pool(&job);
        pthread_mutex_unlock(&pool_in_use);
    }
    return atomic_load(&job.failed);
}
