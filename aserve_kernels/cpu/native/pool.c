/* Threads that share a loop, made for a machine with other work.
 *
 * Iterations are handed out one by one, and the caller waits for iterations, not for threads: a helper that is not
 * running just then takes none, and costs nothing. (A barrier over all threads, as OpenMP has it, waits until the
 * kernel has given every one of them a core.) Helpers spin for some microseconds between loops and then sleep.
 *
 * Where torch multiplies the matrices with OpenMP's threads, the loops between them run on those very threads: they
 * spin for milliseconds after each of their loops, and a second set would find no free core.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define MOST_HELPERS 255
#define SPINS 4000 /* about 50 us */

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

static struct {
    _Atomic uint64_t ticket; /* number of the loop << 32 | iterations that nobody has taken */
    _Atomic long unfinished;
    task_function *_Atomic task;
    void *_Atomic argument;
    _Atomic long count;
    _Atomic int helpers; /* that may take part in this loop */
    _Atomic int sleeping;
    atomic_flag in_use;
    int started, kept_off; /* kept_off: the processor that helpers leave to the caller; -1: none */
    pthread_t threads[MOST_HELPERS];
    pthread_mutex_t lock;
    pthread_cond_t wake;
} pool = {.kept_off = -1, .in_use = ATOMIC_FLAG_INIT, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* Takes one iteration and runs it; 0 if there is none left. The fields belong to the ticket that the exchange has seen
 * unchanged: they are written only while no iteration is left, and no loop ends before its last one has run. */
static int take_one(void) {
    uint64_t ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    while ((uint32_t)ticket) {
        task_function *task = atomic_load_explicit(&pool.task, memory_order_relaxed);
        void *argument = atomic_load_explicit(&pool.argument, memory_order_relaxed);
        long count = atomic_load_explicit(&pool.count, memory_order_relaxed);
        if (atomic_compare_exchange_weak_explicit(
                &pool.ticket, &ticket, ticket - 1, memory_order_acq_rel, memory_order_acquire)) {
            task(argument, count - (long)(uint32_t)ticket);
            atomic_fetch_sub_explicit(&pool.unfinished, 1, memory_order_release);
            return 1;
        }
    }
    return 0;
}

static int may_take(int number) {
    return (uint32_t)atomic_load(&pool.ticket) && number < atomic_load_explicit(&pool.helpers, memory_order_relaxed);
}

static void *help(void *number_of_helper) {
    int number = (int)(intptr_t)number_of_helper;
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++) {
            if (may_take(number))
                while (take_one())
                    spin = 0;
            RELAX();
        }
        pthread_mutex_lock(&pool.lock);
        atomic_fetch_add(&pool.sleeping, 1);
        while (!may_take(number))
            pthread_cond_wait(&pool.wake, &pool.lock);
        atomic_fetch_sub(&pool.sleeping, 1);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

static void forget_helpers(void) { /* a forked child has none of its parent's threads */
    pool.started = 0;
    atomic_store(&pool.ticket, 0);
    atomic_store(&pool.sleeping, 0);
    atomic_flag_clear(&pool.in_use);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
}

static void start_helpers(int wanted) {
    static int registered;
    if (!registered)
        registered = pthread_atfork(NULL, NULL, forget_helpers) == 0;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 4 << 20);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before; /* signals are for Python's main thread */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.started < wanted) {
        void *number = (void *)(intptr_t)pool.started;
        if (pthread_create(&pool.threads[pool.started], &attributes, help, number))
            break; /* the caller does what the missing ones would have done */
        pool.started++;
    }
    pool.kept_off = -1;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* Lets the helpers run anywhere but on the caller's processor. On a machine where all are busy, the kernel would wake a
 * helper right here, in the caller's place: both then take turns on one processor, and a loop of 140 us takes 260. */
static void keep_helpers_off(void) {
#ifdef __linux__
    int here = sched_getcpu();
    if (here == pool.kept_off || here < 0)
        return;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) < 2 || CPU_COUNT(&allowed) > 32)
        return; /* with that many processors one is free, and the caller moves among them too often */
    CPU_CLR(here, &allowed);
    for (int i = 0; i < pool.started; i++)
        pthread_setaffinity_np(pool.threads[i], sizeof allowed, &allowed);
    pool.kept_off = here;
#endif
}

static void run_with_helpers(task_function *task, void *argument, long count, int helpers) {
    if (pool.started < helpers)
        start_helpers((int)min_of(helpers, MOST_HELPERS));
    uint64_t number = (atomic_load_explicit(&pool.ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store_explicit(&pool.task, task, memory_order_relaxed);
    atomic_store_explicit(&pool.argument, argument, memory_order_relaxed);
    atomic_store_explicit(&pool.count, count, memory_order_relaxed);
    atomic_store_explicit(&pool.helpers, helpers, memory_order_relaxed);
    atomic_store_explicit(&pool.unfinished, count, memory_order_relaxed);
    atomic_store(&pool.ticket, number << 32 | (uint64_t)count);
    if (atomic_load(&pool.sleeping)) {
        keep_helpers_off();
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    while (take_one()) {
    }
    for (long spin = 0; atomic_load_explicit(&pool.unfinished, memory_order_acquire); spin++) {
        if (spin < SPINS)
            RELAX();
        else
            sched_yield(); /* a helper was interrupted within an iteration; it may need this very core */
    }
}

/* libgomp's entry for a parallel region, from the copy that torch has loaded; NULL where there is none. */
static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);

EXPORT void aserve_use_libgomp(void *entry) { memcpy(&gomp_parallel, &entry, sizeof entry); }

struct region {
    task_function *task;
    void *argument;
    long count;
    _Atomic long next;
};

static void run_region(void *region_of_all) {
    struct region *region = region_of_all;
    long i;
    while ((i = atomic_fetch_add_explicit(&region->next, 1, memory_order_relaxed)) < region->count)
        region->task(region->argument, i);
}

static void parallel_for(task_function *task, void *argument, long count, int threads) {
    int wanted = (int)min_of(count, threads < 0 ? -threads : threads);
    if (wanted > 1 && threads < 0 && gomp_parallel) {
        struct region region = {task, argument, count, 0};
        gomp_parallel(run_region, &region, (unsigned)wanted, 0);
    } else if (wanted > 1 && threads > 0 && count < UINT32_MAX && !atomic_flag_test_and_set(&pool.in_use)) {
        run_with_helpers(task, argument, count, wanted - 1);
        atomic_flag_clear(&pool.in_use);
    } else { /* alone; also while another thread of the process has the helpers */
        for (long i = 0; i < count; i++)
            task(argument, i);
    }
}
