/* Running the work items of a call in threads. */
#ifndef HEADWISE_THREADS_H
#define HEADWISE_THREADS_H

#include "plan.h"

/* GOMP_parallel: runs a function in several threads and waits for them. */
typedef void OmpParallel(void (*)(void *), void *, unsigned threads, unsigned flags);
typedef int OmpThreadNumber(void); /* omp_get_thread_num */

/* Use the threads of an OpenMP runtime; NULL: our own. A forked process always uses our own, since GNU OpenMP would
   wait for threads that only its parent has. Returns whether the runtime's are used. */
int headwise_use_openmp(OmpParallel *parallel, OmpThreadNumber *thread_number);

/* Run all items of a plan. Returns 0, or 1 where memory ran out. */
int headwise_run_items(RunItem *run_item, const Call *call, const Plan *plan);

#endif
