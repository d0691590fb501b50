/* The threads: a pool of our own, or those of PyTorch's OpenMP runtime; and the scratch memory of each thread. */
#include "threads.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "platform.h"

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
    Mutex lock;
    Condition wake, done;
    Job *job;               /* NULL: none */
    atomic_long generation; /* counts jobs */
    atomic_int working;     /* workers inside of the job */
    int threads;            /* of the job: workers with a higher number sleep on */
    int started;            /* workers; numbered from 1, the caller is 0 */
} pool = {.lock = MUTEX_INITIALIZER, .wake = CONDITION_INITIALIZER, .done = CONDITION_INITIALIZER};

static Mutex pool_in_use = MUTEX_INITIALIZER; /* held by the caller whose job the pool runs */
static ThreadPointer scratch_of_thread;
static atomic_int forked; /* whether the OpenMP threads of this process may be ones that exist only in a parent */

/* ---- processes ---- */

/* The child of a fork has no workers, and whoever held a lock is gone. */
static void after_fork(void) {
    init_mutex(&pool.lock);
    init_mutex(&pool_in_use);
    init_condition(&pool.wake);
    init_condition(&pool.done);
    pool.job = NULL;
    pool.started = 0;
    atomic_store(&pool.working, 0);
    atomic_store(&omp_parallel, NULL); /* its threads did not survive either */
    atomic_store(&forked, 1);
}

static void free_scratch(Scratch *scratch) {
    free_aligned(scratch->memory);
    free(scratch);
}
DEFINE_RELEASE(release_scratch, free_scratch)

/* When the library is loaded, not at the first call: PyTorch may run its threads and fork in between. Nobody noticed a
   fork from before; the operating system is asked for it. */
__attribute__((constructor)) static void watch_forks(void) {
    create_thread_pointer(&scratch_of_thread, release_scratch);
    call_after_fork(after_fork);
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
    Scratch *scratch = get_thread_pointer(scratch_of_thread);
    if (!scratch) {
        scratch = calloc(1, sizeof *scratch);
        if (!scratch) return NULL;
        set_thread_pointer(scratch_of_thread, scratch);
    }
    if (scratch->size < bytes) {
        free_aligned(scratch->memory);
        scratch->memory = allocate_aligned(SCRATCH_ALIGN, bytes);
        scratch->size = scratch->memory ? bytes : 0;
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
        free_aligned(scratch->memory);
        scratch->memory = NULL;
        scratch->size = 0;
    }
}

/* By the thread's own number: what it cached in the last call it is likely to need again. */
static void work_in_openmp(void *job) { work(job, atomic_load(&omp_thread_number)()); }

/* ---- our own pool ---- */

static void worker(int thread) {
    long seen = 0; /* the last generation that this worker need not look at */
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.generation) == seen; i++) PAUSE();
        lock_mutex(&pool.lock);
        while (!pool.job || atomic_load(&pool.generation) == seen || thread >= pool.threads) {
            if (!pool.job) seen = atomic_load(&pool.generation);
            wait_for(&pool.wake, &pool.lock);
        }
        seen = atomic_load(&pool.generation);
        Job *job = pool.job;
        atomic_fetch_add(&pool.working, 1);
        unlock_mutex(&pool.lock);
        work(job, thread);
        lock_mutex(&pool.lock);
        atomic_fetch_sub(&pool.working, 1);
        signal_one(&pool.done);
        unlock_mutex(&pool.lock);
    }
}
DEFINE_THREAD(worker_thread, worker)

static void start_workers(int count) {
    while (pool.started < count && start_thread(worker_thread, pool.started + 1)) pool.started++;
}

/* The caller works as thread 0; workers that have not woken by the time it is done are not waited for. */
static void run_in_pool(Job *job) {
    lock_mutex(&pool.lock);
    start_workers(job->threads - 1);
    pool.job = job;
    pool.threads = job->threads;
    atomic_fetch_add(&pool.generation, 1);
    signal_all(&pool.wake);
    unlock_mutex(&pool.lock);
    work(job, 0);
    for (int i = 0; i < SPINS && atomic_load(&pool.working); i++) PAUSE();
    lock_mutex(&pool.lock);
    pool.job = NULL;
    while (atomic_load(&pool.working)) wait_for(&pool.done, &pool.lock);
    unlock_mutex(&pool.lock);
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
    int alone = job.threads == 1 || (!parallel && !try_lock_mutex(&pool_in_use));
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
        unlock_mutex(&pool_in_use);
    }
    return atomic_load(&job.failed);
}
