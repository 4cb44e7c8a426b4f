/* Device memory: which addresses are handed out, how many bytes are left, and what the host wrote there.
 *
 * Addresses come from fixed windows of virtual address space, lowest free address first, so the same calls give the
 * same addresses in every process. A window is reserved host memory without commitment: a device pointer is a real
 * host address, a copy is a memmove, and only pages that something was copied to cost host memory. Memory that was
 * never written, was freed, or took a transfer of more than VGPU_CARRIED_BYTES reads as zeros.
 *
 * All state here is behind one lock.
 */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void lock_all(void) { pthread_mutex_lock(&lock); }
static void unlock_all(void) { pthread_mutex_unlock(&lock); }
/* a child forked while another thread holds the lock must not inherit it locked */
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(lock_all, unlock_all, unlock_all); }

static uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/* --- tables of address ranges, sorted by address ------------------------------------------------------------------ */

typedef struct physical {
    int device, references, mappings;
    uint64_t size;
} physical;

typedef struct {
    uint64_t start, size;
    physical *memory;    /* of a mapping */
    enum vgpu_kind kind; /* of host memory; VGPU_UNKNOWN for memory that was only registered */
} range;

typedef struct {
    range *items;
    size_t count, room;
} table;

/* Index of the first range that ends after `address`. */
static size_t first_after(const table *t, uint64_t address) {
    size_t low = 0, high = t->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (t->items[middle].start + t->items[middle].size > address) high = middle;
        else low = middle + 1;
    }
    return low;
}

static range *containing(const table *t, uint64_t address) {
    size_t i = first_after(t, address);
    return i < t->count && t->items[i].start <= address ? &t->items[i] : NULL;
}

static int overlaps(const table *t, uint64_t start, uint64_t size) {
    size_t i = first_after(t, start);
    return i < t->count && t->items[i].start < start + size;
}

static int covered(const table *t, uint64_t start, uint64_t size) {
    for (uint64_t end = start + size; start < end;) {
        const range *r = containing(t, start);
        if (!r) return 0;
        start = r->start + r->size;
    }
    return 1;
}

static void insert(table *t, range r) {
    if (t->count == t->room) {
        t->room = t->room ? 2 * t->room : 256;
        t->items = realloc(t->items, t->room * sizeof r);
        if (!t->items) abort();
    }
    size_t i = first_after(t, r.start);
    memmove(&t->items[i + 1], &t->items[i], (t->count++ - i) * sizeof r);
    t->items[i] = r;
}

static void take_out(table *t, range *r) {
    size_t i = (size_t)(r - t->items);
    memmove(r, r + 1, (--t->count - i) * sizeof *r);
}

/* The lowest free address of [start, end) that has room for `size` bytes, or 0. */
static uint64_t first_fit(const table *t, uint64_t start, uint64_t end, uint64_t size, uint64_t alignment) {
    uint64_t candidate = round_up(start, alignment);
    for (size_t i = first_after(t, candidate); i < t->count && t->items[i].start < candidate + size; i++)
        candidate = round_up(t->items[i].start + t->items[i].size, alignment);
    return candidate + size <= end ? candidate : 0;
}

/* --- windows and the data in them --------------------------------------------------------------------------------- */

#define TIB (1ull << 40)
#define FIRST_WINDOW (16 * TIB) /* far from where Linux puts programs, heaps and libraries */
#define HALF_WINDOW (TIB)       /* of a device: cudaMalloc in the first half, pools in the second */
#define DEVICE_WINDOW (2 * TIB)
#define MAPPED_WINDOW (FIRST_WINDOW + VGPU_MAX_DEVICES * DEVICE_WINDOW) /* cuMemAddressReserve, for all devices */
#define MAPPED_WINDOW_BYTES (32 * TIB)
#define LAST_WINDOW_END (MAPPED_WINDOW + MAPPED_WINDOW_BYTES)
#define CHUNK VGPU_GRANULARITY

/* One bit per chunk that a copy may have written; an unwritten chunk is known to be zero without reading it. */
typedef struct {
    uint64_t start;
    uint8_t *written; /* NULL when the window has no host memory behind it */
    int opened;
} window;
static window device_windows[VGPU_MAX_DEVICES], mapped_window;

static int on_device(uint64_t address) { return address >= FIRST_WINDOW && address < LAST_WINDOW_END; }

static uint64_t device_window(int device) { return FIRST_WINDOW + (uint64_t)device * DEVICE_WINDOW; }

static window *window_of(uint64_t address) {
    if (address >= MAPPED_WINDOW) return &mapped_window;
    return &device_windows[(address - FIRST_WINDOW) / DEVICE_WINDOW];
}

static void open_window(window *w, uint64_t start, uint64_t size) {
    if (w->opened) return;
    w->opened = 1;
    w->start = start;
    void *got = mmap((void *)start, size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == (void *)start) {
        madvise(got, size, MADV_NOHUGEPAGE); /* a written byte costs 4 KiB of host memory, not 2 MiB */
        madvise(got, size, MADV_DONTDUMP);
        w->written = calloc(size / CHUNK / 8, 1);
    } else {
        if (got != MAP_FAILED) munmap(got, size);
        fprintf(stderr, "pytest-mbmem virtual GPU: this system grants no %llu TiB of virtual addresses (ulimit -v, or "
                "vm.overcommit_memory=2), so copies carry no data\n", (unsigned long long)(size / TIB));
    }
}

static int is_written(const window *w, uint64_t address) {
    uint64_t chunk = (address - w->start) / CHUNK;
    return w->written && (w->written[chunk / 8] >> (chunk % 8) & 1);
}

static void mark_written(window *w, uint64_t address, uint64_t size) {
    for (uint64_t chunk = (address - w->start) / CHUNK; chunk <= (address + size - 1 - w->start) / CHUNK; chunk++)
        w->written[chunk / 8] |= (uint8_t)(1 << chunk % 8);
}

/* Zero whole pages by giving them back, and the rest by writing. Only for private anonymous memory. */
static void zero_pages(uint64_t start, uint64_t size) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end = start + size;
    uint64_t first = round_up(start, page), last = end / page * page;
    if (first >= last) {
        memset((void *)start, 0, size);
        return;
    }
    memset((void *)start, 0, first - start);
    madvise((void *)first, last - first, MADV_DONTNEED);
    memset((void *)last, 0, end - last);
}

/* The part of [address, address + size) that lies in address's chunk. */
static uint64_t within_chunk(uint64_t address, uint64_t size) {
    uint64_t rest = CHUNK - address % CHUNK;
    return size < rest ? size : rest;
}

static void zero_device(uint64_t address, uint64_t size) {
    window *w = window_of(address);
    for (uint64_t part; size; address += part, size -= part) {
        part = within_chunk(address, size);
        if (!is_written(w, address)) continue;
        zero_pages(address, part);
        uint64_t chunk = (address - w->start) / CHUNK;
        if (part == CHUNK) w->written[chunk / 8] &= (uint8_t)~(1 << chunk % 8);
    }
}

/* --- devices ------------------------------------------------------------------------------------------------------ */

static struct device {
    vgpu_counters counters;
    table blocks, pool_blocks;
    vgpu_pool pool; /* `reserved` is how far the pool's half of the window is charged */
} devices[VGPU_MAX_DEVICES];

static table reservations, mappings, host_memory;

static uint64_t left(const struct device *d) {
    const vgpu_config *config = vgpu_configuration();
    uint64_t taken = config->context_bytes + d->counters.bytes_used;
    taken += vgpu_foreign_bytes(&config->staged, config->installed[d - devices]);
    return taken < config->capacity ? config->capacity - taken : 0;
}

static int charge(struct device *d, uint64_t bytes) {
    if (bytes > left(d)) {
        d->counters.failed_allocations++;
        return VGPU_OUT_OF_MEMORY;
    }
    d->counters.allocations++;
    d->counters.bytes_used += bytes;
    if (d->counters.bytes_used > d->counters.bytes_peak) d->counters.bytes_peak = d->counters.bytes_used;
    return VGPU_SUCCESS;
}

static void uncharge(struct device *d, uint64_t bytes) {
    d->counters.frees++;
    d->counters.bytes_used -= bytes;
}

static int malloc_locked(int device, uint64_t bytes, uint64_t *address) {
    struct device *d = &devices[device];
    uint64_t size = round_up(bytes, VGPU_GRANULARITY), start = device_window(device);
    *address = 0;
    if (bytes == 0) return VGPU_SUCCESS; /* as the real runtime: NULL */
    if (bytes > HALF_WINDOW) {
        d->counters.failed_allocations++;
        return VGPU_OUT_OF_MEMORY;
    }
    uint64_t found = first_fit(&d->blocks, start, start + HALF_WINDOW, size, VGPU_GRANULARITY);
    int status = found ? charge(d, size) : VGPU_OUT_OF_MEMORY;
    if (status) return status;
    open_window(&device_windows[device], start, DEVICE_WINDOW);
    insert(&d->blocks, (range){.start = found, .size = size});
    *address = found;
    return VGPU_SUCCESS;
}

int vgpu_malloc(int device, uint64_t bytes, uint64_t *address) {
    lock_all();
    int status = malloc_locked(device, bytes, address);
    unlock_all();
    return status;
}

/* The pool of cudaMallocAsync is a heap of its own: blocks of 512 bytes, and it grows at its end in 2 MiB steps. */
static void trim_locked(int device, uint64_t keep) {
    struct device *d = &devices[device];
    const table *t = &d->pool_blocks;
    uint64_t start = device_window(device) + HALF_WINDOW;
    uint64_t live = t->count ? t->items[t->count - 1].start + t->items[t->count - 1].size - start : 0;
    uint64_t target = round_up(live > keep ? live : keep, VGPU_GRANULARITY);
    if (target >= d->pool.reserved) return;
    uncharge(d, d->pool.reserved - target);
    d->pool.reserved = target;
}

static int pool_malloc_locked(int device, uint64_t bytes, uint64_t *address) {
    struct device *d = &devices[device];
    uint64_t size = round_up(bytes, VGPU_POOL_ALIGNMENT), start = device_window(device) + HALF_WINDOW;
    *address = 0;
    if (bytes == 0) return VGPU_SUCCESS;
    uint64_t found =
        bytes > HALF_WINDOW ? 0 : first_fit(&d->pool_blocks, start, start + HALF_WINDOW, size, VGPU_POOL_ALIGNMENT);
    if (!found) {
        d->counters.failed_allocations++;
        return VGPU_OUT_OF_MEMORY;
    }
    uint64_t needed = round_up(found + size - start, VGPU_GRANULARITY);
    if (needed > d->pool.reserved) {
        int status = charge(d, needed - d->pool.reserved);
        if (status) return status;
        d->pool.reserved = needed;
        if (needed > d->pool.reserved_high) d->pool.reserved_high = needed;
    }
    open_window(&device_windows[device], device_window(device), DEVICE_WINDOW);
    insert(&d->pool_blocks, (range){.start = found, .size = size});
    d->pool.used += size;
    if (d->pool.used > d->pool.used_high) d->pool.used_high = d->pool.used;
    *address = found;
    return VGPU_SUCCESS;
}

int vgpu_pool_malloc(int device, uint64_t bytes, uint64_t *address) {
    lock_all();
    int status = pool_malloc_locked(device, bytes, address);
    unlock_all();
    return status;
}

static int free_locked(uint64_t address) {
    if (address == 0) return VGPU_SUCCESS;
    if (address < FIRST_WINDOW || address >= MAPPED_WINDOW) return VGPU_INVALID_VALUE;
    struct device *d = &devices[(address - FIRST_WINDOW) / DEVICE_WINDOW];
    int pooled = (address - FIRST_WINDOW) % DEVICE_WINDOW >= HALF_WINDOW;
    table *t = pooled ? &d->pool_blocks : &d->blocks;
    range *r = containing(t, address);
    if (!r || r->start != address) return VGPU_INVALID_VALUE; /* never allocated, or freed already */
    zero_device(r->start, r->size);
    if (pooled) d->pool.used -= r->size;
    else uncharge(d, r->size);
    take_out(t, r);
    return VGPU_SUCCESS;
}

int vgpu_free(uint64_t address) {
    lock_all();
    int status = free_locked(address);
    unlock_all();
    return status;
}

void vgpu_memory_info(int device, uint64_t *free_bytes, uint64_t *total_bytes) {
    lock_all();
    *free_bytes = left(&devices[device]);
    *total_bytes = vgpu_configuration()->capacity;
    unlock_all();
}

vgpu_pool vgpu_pool_state(int device) {
    lock_all();
    vgpu_pool state = devices[device].pool;
    unlock_all();
    return state;
}

void vgpu_pool_set_threshold(int device, uint64_t bytes) {
    lock_all();
    devices[device].pool.release_threshold = bytes;
    unlock_all();
}

void vgpu_pool_reset_high(int device) {
    lock_all();
    devices[device].pool.used_high = devices[device].pool.used;
    devices[device].pool.reserved_high = devices[device].pool.reserved;
    unlock_all();
}

void vgpu_pool_trim(int device, uint64_t keep_bytes) {
    lock_all();
    trim_locked(device, keep_bytes);
    unlock_all();
}

void vgpu_synchronize(int device) { vgpu_pool_trim(device, vgpu_pool_state(device).release_threshold); }

int vgpu_read_counters(int device, vgpu_counters *counters) {
    if (device < 0 || device >= VGPU_MAX_DEVICES) return VGPU_INVALID_DEVICE;
    lock_all();
    *counters = devices[device].counters;
    unlock_all();
    counters->kernel_launches = vgpu_launches(device);
    return VGPU_SUCCESS;
}

/* --- host memory: pinned, managed, registered --------------------------------------------------------------------- */

int vgpu_host_alloc(uint64_t bytes, enum vgpu_kind kind, void **pointer) {
    *pointer = NULL;
    if (bytes == 0) return VGPU_SUCCESS;
    void *got = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return VGPU_OUT_OF_MEMORY;
    lock_all();
    insert(&host_memory, (range){.start = (uint64_t)got, .size = bytes, .kind = kind});
    unlock_all();
    *pointer = got;
    return VGPU_SUCCESS;
}

int vgpu_host_free(void *pointer) {
    if (!pointer) return VGPU_SUCCESS;
    lock_all();
    range *r = containing(&host_memory, (uint64_t)pointer);
    int known = r && r->start == (uint64_t)pointer && r->kind != VGPU_UNKNOWN;
    if (known) {
        munmap(pointer, r->size);
        take_out(&host_memory, r);
    }
    unlock_all();
    return known ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

int vgpu_host_register(void *pointer, uint64_t bytes) {
    if (!pointer || bytes == 0) return VGPU_INVALID_VALUE;
    lock_all();
    int taken = overlaps(&host_memory, (uint64_t)pointer, bytes);
    if (!taken) insert(&host_memory, (range){.start = (uint64_t)pointer, .size = bytes});
    unlock_all();
    return taken ? VGPU_HOST_ALREADY_REGISTERED : VGPU_SUCCESS;
}

int vgpu_host_unregister(void *pointer) {
    lock_all();
    range *r = containing(&host_memory, (uint64_t)pointer);
    int known = r && r->start == (uint64_t)pointer && r->kind == VGPU_UNKNOWN;
    if (known) take_out(&host_memory, r);
    unlock_all();
    return known ? VGPU_SUCCESS : VGPU_HOST_NOT_REGISTERED;
}

vgpu_pointer vgpu_find(uint64_t address) {
    vgpu_pointer found = {VGPU_UNKNOWN, -1, 0, 0};
    const range *r;
    lock_all();
    if (address >= MAPPED_WINDOW && address < LAST_WINDOW_END) {
        r = containing(&mappings, address);
        if (r) found = (vgpu_pointer){VGPU_DEVICE, r->memory->device, r->start, r->size};
    } else if (on_device(address)) {
        int device = (int)((address - FIRST_WINDOW) / DEVICE_WINDOW);
        r = containing(&devices[device].blocks, address);
        if (!r) r = containing(&devices[device].pool_blocks, address);
        if (r) found = (vgpu_pointer){VGPU_DEVICE, device, r->start, r->size};
    } else if ((r = containing(&host_memory, address))) {
        found = (vgpu_pointer){r->kind == VGPU_MANAGED ? VGPU_MANAGED : VGPU_HOST, 0, r->start, r->size};
    }
    unlock_all();
    return found;
}

/* --- virtual memory management ------------------------------------------------------------------------------------ */

int vgpu_reserve(uint64_t bytes, uint64_t alignment, uint64_t *address) {
    if (!address || bytes == 0 || bytes % VGPU_GRANULARITY) return VGPU_INVALID_VALUE;
    if (alignment < VGPU_GRANULARITY) alignment = VGPU_GRANULARITY;
    lock_all();
    open_window(&mapped_window, MAPPED_WINDOW, MAPPED_WINDOW_BYTES);
    *address = bytes > MAPPED_WINDOW_BYTES
                   ? 0
                   : first_fit(&reservations, MAPPED_WINDOW, LAST_WINDOW_END, bytes, alignment);
    if (*address) insert(&reservations, (range){.start = *address, .size = bytes});
    unlock_all();
    return *address ? VGPU_SUCCESS : VGPU_OUT_OF_MEMORY;
}

int vgpu_unreserve(uint64_t address, uint64_t bytes) {
    lock_all();
    range *r = containing(&reservations, address);
    int valid = r && r->start == address && r->size == bytes && !overlaps(&mappings, address, bytes);
    if (valid) take_out(&reservations, r);
    unlock_all();
    return valid ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

int vgpu_physical_create(int device, uint64_t bytes, uint64_t *handle) {
    if (!handle || bytes == 0 || bytes % VGPU_GRANULARITY) return VGPU_INVALID_VALUE;
    if (device < 0 || device >= vgpu_configuration()->device_count) return VGPU_INVALID_DEVICE;
    physical *memory = malloc(sizeof *memory);
    if (!memory) abort();
    *memory = (physical){.device = device, .references = 1, .size = bytes};
    lock_all();
    int status = charge(&devices[device], bytes);
    unlock_all();
    if (status) free(memory);
    else *handle = (uint64_t)(uintptr_t)memory;
    return status;
}

static void drop_if_unused(physical *memory) {
    if (memory->references || memory->mappings) return;
    uncharge(&devices[memory->device], memory->size);
    free(memory);
}

int vgpu_physical_release(uint64_t handle) {
    physical *memory = (physical *)(uintptr_t)handle;
    if (!memory) return VGPU_INVALID_VALUE;
    lock_all();
    int valid = memory->references > 0;
    if (valid) {
        memory->references--;
        drop_if_unused(memory);
    }
    unlock_all();
    return valid ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

int vgpu_physical_retain(uint64_t address, uint64_t *handle) {
    lock_all();
    range *r = containing(&mappings, address);
    if (r) {
        r->memory->references++;
        *handle = (uint64_t)(uintptr_t)r->memory;
    }
    unlock_all();
    return r ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

int vgpu_physical_device(uint64_t handle) { return ((physical *)(uintptr_t)handle)->device; }

int vgpu_map(uint64_t address, uint64_t bytes, uint64_t handle) {
    physical *memory = (physical *)(uintptr_t)handle;
    if (!memory || bytes != memory->size || address % VGPU_GRANULARITY) return VGPU_INVALID_VALUE;
    lock_all();
    const range *reserved = containing(&reservations, address);
    int valid = reserved && address + bytes <= reserved->start + reserved->size &&
                !overlaps(&mappings, address, bytes);
    if (valid) {
        insert(&mappings, (range){.start = address, .size = bytes, .memory = memory});
        memory->mappings++;
    }
    unlock_all();
    return valid ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

/* The data lives with the address, not with the physical memory: mapped again elsewhere, it reads as zeros. */
int vgpu_unmap(uint64_t address, uint64_t bytes) {
    lock_all();
    const range *first = containing(&mappings, address);
    int valid = first && first->start == address && covered(&mappings, address, bytes);
    if (valid) {
        zero_device(address, bytes);
        for (uint64_t end = address + bytes; overlaps(&mappings, address, end - address);) {
            range *r = &mappings.items[first_after(&mappings, address)];
            physical *memory = r->memory;
            take_out(&mappings, r);
            memory->mappings--;
            drop_if_unused(memory);
        }
    }
    unlock_all();
    return valid ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

int vgpu_set_access(uint64_t address, uint64_t bytes) {
    lock_all();
    int valid = covered(&mappings, address, bytes);
    unlock_all();
    return valid ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* Of a live address. */
static struct device *device_at(uint64_t address) {
    if (address >= MAPPED_WINDOW) return &devices[containing(&mappings, address)->memory->device];
    return &devices[(address - FIRST_WINDOW) / DEVICE_WINDOW];
}

static int is_live(uint64_t address, uint64_t bytes) {
    if (address >= MAPPED_WINDOW) return covered(&mappings, address, bytes);
    const struct device *d = &devices[(address - FIRST_WINDOW) / DEVICE_WINDOW];
    int pooled = (address - FIRST_WINDOW) % DEVICE_WINDOW >= HALF_WINDOW;
    return covered(pooled ? &d->pool_blocks : &d->blocks, address, bytes);
}

/* Zeros into host memory; pinned memory of ours gives its pages back instead of being filled. */
static void zero_host(uint64_t address, uint64_t bytes) {
    const range *r = containing(&host_memory, address);
    if (r && r->kind != VGPU_UNKNOWN && address + bytes <= r->start + r->size) zero_pages(address, bytes);
    else memset((void *)address, 0, bytes);
}

static void device_to_host(uint64_t to, uint64_t from, uint64_t bytes) {
    const window *w = window_of(from);
    while (bytes) {
        /* as many chunks as are alike */
        int written = is_written(w, from);
        uint64_t part = within_chunk(from, bytes);
        while (part < bytes && is_written(w, from + part) == written) part += within_chunk(from + part, bytes - part);
        if (written) memcpy((void *)to, (const void *)from, part);
        else zero_host(to, part);
        to += part, from += part, bytes -= part;
    }
}

static int any_written(uint64_t address, uint64_t bytes) {
    const window *w = window_of(address);
    for (uint64_t part; bytes; address += part, bytes -= part) {
        part = within_chunk(address, bytes);
        if (is_written(w, address)) return 1;
    }
    return 0;
}

/* Judged by the first bytes of a large copy. */
static int all_zero(const unsigned char *bytes, uint64_t count) {
    for (uint64_t i = 0; i < count && i < 4096; i++)
        if (bytes[i]) return 0;
    return 1;
}

/* Answers to reads, in the order in which they were given. */
typedef struct answer {
    struct answer *next;
    uint64_t from, count; /* from: 0 for any address */
    unsigned char bytes[];
} answer;
static answer *first_answer, **end_of_answers = &first_answer;
static uint64_t answers_left;

static int take_answer(uint64_t to, uint64_t from, uint64_t count) {
    for (answer **at = &first_answer; *at; at = &(*at)->next) {
        answer *a = *at;
        if (a->count != count || (a->from && a->from != from)) continue;
        memcpy((void *)to, a->bytes, count);
        *at = a->next;
        if (!a->next) end_of_answers = at;
        free(a);
        answers_left--;
        return 1;
    }
    return 0;
}

void vgpu_answer_read(const void *from, const void *bytes, uint64_t count) {
    answer *a = malloc(sizeof *a + count);
    if (!a) abort();
    *a = (answer){.from = (uint64_t)from, .count = count};
    memcpy(a->bytes, bytes, count);
    lock_all();
    *end_of_answers = a;
    end_of_answers = &a->next;
    answers_left++;
    unlock_all();
}

uint64_t vgpu_answers_left(void) {
    lock_all();
    uint64_t left_over = answers_left;
    unlock_all();
    return left_over;
}

void vgpu_forget_answers(void) {
    lock_all();
    for (answer *next; first_answer; first_answer = next) {
        next = first_answer->next;
        free(first_answer);
    }
    end_of_answers = &first_answer;
    answers_left = 0;
    unlock_all();
}

static vgpu_on_read on_read;

void vgpu_tell_reads(vgpu_on_read call) { __atomic_store_n(&on_read, call, __ATOMIC_RELEASE); }

/* `unanswered` counts the copies to the host that nobody gave an answer for. */
static int copy_locked(uint64_t to, uint64_t from, uint64_t bytes, uint64_t transfer, uint64_t *unanswered) {
    int to_device = on_device(to), from_device = on_device(from);
    if ((to_device && !is_live(to, bytes)) || (from_device && !is_live(from, bytes))) return VGPU_INVALID_VALUE;
    if (to_device && !from_device) device_at(to)->counters.bytes_to_device += bytes;
    if (from_device && !to_device) device_at(from)->counters.bytes_to_host += bytes;
    if (!to_device && !from_device) {
        memmove((void *)to, (const void *)from, bytes);
    } else if (!to_device) {
        if (!take_answer(to, from, bytes)) {
            device_to_host(to, from, bytes);
            int device = vgpu_current_device();
            struct device *d = &devices[device < 0 ? 0 : device];
            d->counters.unanswered_reads++;
            if (all_zero((const unsigned char *)to, bytes)) d->counters.zero_reads++;
            ++*unanswered;
        }
    } else if (transfer > VGPU_CARRIED_BYTES || !window_of(to)->written ||
               (from_device && !any_written(from, bytes))) {
        zero_device(to, bytes);
    } else {
        mark_written(window_of(to), to, bytes);
        memmove((void *)to, (const void *)from, bytes);
    }
    return VGPU_SUCCESS;
}

int vgpu_copy_2d(void *to, uint64_t to_pitch, const void *from, uint64_t from_pitch, uint64_t width, uint64_t height) {
    if (width == 0 || height == 0) return VGPU_SUCCESS;
    if (!to || !from || width > to_pitch || width > from_pitch) return VGPU_INVALID_VALUE;
    int status = VGPU_SUCCESS;
    uint64_t unanswered = 0;
    lock_all();
    for (uint64_t row = 0; row < height && status == VGPU_SUCCESS; row++)
        status = copy_locked((uint64_t)to + row * to_pitch, (uint64_t)from + row * from_pitch, width, width * height,
                             &unanswered);
    unlock_all();
    vgpu_on_read call = __atomic_load_n(&on_read, __ATOMIC_ACQUIRE);
    if (unanswered && call) call(unanswered * width); /* without the lock: it may well ask for something here */
    return status;
}

int vgpu_fill(void *to, uint32_t pattern, int pattern_bytes, uint64_t count) {
    uint64_t address = (uint64_t)to, bytes = count * (uint64_t)pattern_bytes;
    int status = VGPU_SUCCESS;
    if (bytes == 0) return VGPU_SUCCESS;
    if (!to) return VGPU_INVALID_VALUE;
    lock_all();
    int device = on_device(address);
    if (device && !is_live(address, bytes)) {
        status = VGPU_INVALID_VALUE;
    } else if (device && (pattern == 0 || bytes > VGPU_CARRIED_BYTES || !window_of(address)->written)) {
        zero_device(address, bytes);
    } else {
        if (device) mark_written(window_of(address), address, bytes);
        for (uint64_t i = 0; i < count; i++) memcpy((char *)to + i * (uint64_t)pattern_bytes, &pattern, pattern_bytes);
    }
    unlock_all();
    return status;
}
