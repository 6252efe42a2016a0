/* Virtual memory management: physical allocations by handle, address ranges, mappings and their protection. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TYPE_PINNED = 1, LOCATION_DEVICE = 1, HANDLE_FD = 1, HANDLE_FABRIC = 8, ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };

struct location { int type, id; };

struct properties {
    int type, handle_types;
    struct location location;
    void *win32;
    uint8_t compression, rdma;
    uint16_t usage;
    uint8_t reserved[4];
};

struct access_description {
    struct location location;
    int flags;
};

struct fabric_handle { /* 64 bytes; names memory and keeps none */
    uint32_t magic, unused;
    uint64_t inode;
    uint8_t unused2[48];
};

struct handle {
    struct handle *next;
    CUhandle id;
    struct memory memory;
    int handle_types;
};

struct range { /* a reservation, or a mapping in one */
    struct range *next;
    CUdeviceptr start;
    size_t size;
    int device, access;
};

static struct handle *handles;
static struct range *reservations, *mappings;
static CUhandle last_id = 0x5000;

static struct handle *find_handle(CUhandle id)
{
    struct handle *found = handles;
    while (found && found->id != id) found = found->next;
    return found;
}

static void add_range(struct range **list, CUdeviceptr start, size_t size, int device)
{
    struct range *range = malloc(sizeof *range);
    *range = (struct range){*list, start, size, device, 0};
    *list = range;
}

static struct range **find_range(struct range **list, CUdeviceptr start, size_t size)
{
    while (*list && ((*list)->start != start || (*list)->size != size)) list = &(*list)->next;
    return list;
}

static void remove_range(struct range **place)
{
    struct range *range = *place;
    *place = range->next;
    free(range);
}

static int overlaps(const struct range *range, CUdeviceptr start, size_t size)
{
    return range->start < start + size && start < range->start + range->size;
}

/* The mapping that an address lies in. */
static struct range *mapping_at(CUdeviceptr address)
{
    struct range *found = mappings;
    while (found && !(found->start <= address && address < found->start + found->size)) found = found->next;
    return found;
}

int vmm_covers(CUdeviceptr start, size_t size, int writes)
{
    CUdeviceptr end = start + size;
    int covers = 1;
    pthread_mutex_lock(&tables);
    while (covers && start < end) {
        struct range *mapping = mapping_at(start);
        covers = mapping && (writes ? mapping->access == ACCESS_READ_WRITE : mapping->access != 0);
        if (covers) start = mapping->start + mapping->size;
    }
    pthread_mutex_unlock(&tables);
    return covers;
}

static int device_of(const struct properties *wanted)
{
    if (wanted->type != TYPE_PINNED || wanted->location.type != LOCATION_DEVICE) return -1;
    return physical(wanted->location.id);
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const struct properties *wanted, int option)
{
    ENTER(cuMemGetAllocationGranularity);
    if (option < 0 || option > 1) return INVALID_VALUE;
    if (device_of(wanted) < 0) return INVALID_DEVICE;
    *granularity = GRANULARITY;
    return SUCCESS;
}

static CUresult add_handle(CUhandle *id, struct memory memory, int handle_types)
{
    struct handle *handle = malloc(sizeof *handle);
    pthread_mutex_lock(&tables);
    *handle = (struct handle){handles, ++last_id, memory, handle_types};
    handles = handle;
    *id = handle->id;
    pthread_mutex_unlock(&tables);
    count_live(LIVE_HANDLES, 1);
    return SUCCESS;
}

CUresult cuMemCreate(CUhandle *id, size_t size, const struct properties *wanted, unsigned long long flags)
{
    ENTER(cuMemCreate);
    int device = device_of(wanted);
    if (device < 0) return INVALID_DEVICE;
    if (flags || !size || size % GRANULARITY) return INVALID_VALUE;
    uint32_t able = state->devices[device].flags;
    if (!(able & HAS_VMM) || wanted->handle_types & ~(HANDLE_FD | HANDLE_FABRIC)) return NOT_SUPPORTED;
    if (wanted->handle_types & HANDLE_FD && !(able & HAS_FD)) return NOT_SUPPORTED;
    if (wanted->handle_types & HANDLE_FABRIC && !(able & HAS_FABRIC)) return NOT_SUPPORTED;
    struct memory memory;
    CUresult result = take_memory(device, size, &memory);
    return result == SUCCESS ? add_handle(id, memory, wanted->handle_types) : result;
}

CUresult cuMemRelease(CUhandle id)
{
    ENTER(cuMemRelease);
    pthread_mutex_lock(&tables);
    struct handle **place = &handles;
    while (*place && (*place)->id != id) place = &(*place)->next;
    struct handle *handle = *place;
    if (handle) *place = handle->next;
    pthread_mutex_unlock(&tables);
    if (!handle) return INVALID_VALUE;
    close(handle->memory.fd);
    free(handle);
    count_live(LIVE_HANDLES, -1);
    return SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *out, CUhandle id, int type, unsigned long long flags)
{
    ENTER(cuMemExportToShareableHandle);
    CUresult result = SUCCESS;
    pthread_mutex_lock(&tables);
    struct handle *handle = find_handle(id);
    struct stat found;
    if (!handle || flags || (type != HANDLE_FD && type != HANDLE_FABRIC) || !(handle->handle_types & type))
        result = INVALID_VALUE;
    else if (type == HANDLE_FABRIC) {
        fstat(handle->memory.fd, &found);
        *(struct fabric_handle *)out = (struct fabric_handle){MAGIC, 0, found.st_ino, {0}};
    } else {
        int fd = fcntl(handle->memory.fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0) result = OPERATING_SYSTEM;
        else *(int *)out = fd;
    }
    pthread_mutex_unlock(&tables);
    return result;
}

CUresult cuMemImportFromShareableHandle(CUhandle *id, void *os_handle, int type)
{
    ENTER(cuMemImportFromShareableHandle);
    const struct fabric_handle *fabric = os_handle;
    struct memory memory;
    CUresult result = NOT_SUPPORTED;
    if (type == HANDLE_FD) result = open_memory((int)(intptr_t)os_handle, &memory);
    if (type == HANDLE_FABRIC) result = fabric->magic == MAGIC ? find_memory(fabric->inode, &memory) : INVALID_VALUE;
    return result == SUCCESS ? add_handle(id, memory, type) : result;
}

CUresult cuMemGetAllocationPropertiesFromHandle(struct properties *out, CUhandle id)
{
    ENTER(cuMemGetAllocationPropertiesFromHandle);
    pthread_mutex_lock(&tables);
    struct handle *handle = find_handle(id);
    if (handle)
        *out = (struct properties){.type = TYPE_PINNED, .handle_types = handle->handle_types,
                                   .location = {LOCATION_DEVICE, visible_index(handle->memory.device)}};
    pthread_mutex_unlock(&tables);
    return handle ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags)
{
    (void)wanted;
    ENTER(cuMemAddressReserve);
    if (!size || size % GRANULARITY || flags || (alignment & (alignment - 1))) return INVALID_VALUE;
    size_t room = alignment > GRANULARITY ? alignment : GRANULARITY;
    char *address = mmap(NULL, size + room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return OUT_OF_MEMORY;
    char *aligned = (char *)(((uintptr_t)address + room - 1) / room * room);
    if (aligned > address) munmap(address, (size_t)(aligned - address));
    if (aligned + size < address + size + room) munmap(aligned + size, (size_t)(address + room - aligned));
    pthread_mutex_lock(&tables);
    add_range(&reservations, (CUdeviceptr)aligned, size, -1);
    pthread_mutex_unlock(&tables);
    count_live(LIVE_RESERVATIONS, 1);
    *out = (CUdeviceptr)aligned;
    return SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t size)
{
    ENTER(cuMemAddressFree);
    CUresult result = SUCCESS;
    pthread_mutex_lock(&tables);
    for (struct range *mapping = mappings; mapping; mapping = mapping->next)
        if (overlaps(mapping, start, size)) result = INVALID_VALUE;
    struct range **place = find_range(&reservations, start, size);
    if (!*place) result = INVALID_VALUE;
    if (result == SUCCESS) {
        munmap((void *)start, size);
        remove_range(place);
        count_live(LIVE_RESERVATIONS, -1);
    }
    pthread_mutex_unlock(&tables);
    return result;
}

static CUresult map_locked(CUdeviceptr start, size_t size, CUhandle id)
{
    struct handle *handle = find_handle(id);
    if (!handle || !size || size % GRANULARITY || size > handle->memory.size) return INVALID_VALUE;
    struct range *reserved = reservations;
    while (reserved && !(reserved->start <= start && start + size <= reserved->start + reserved->size))
        reserved = reserved->next;
    if (!reserved || start % GRANULARITY) return INVALID_VALUE;
    for (struct range *mapping = mappings; mapping; mapping = mapping->next)
        if (overlaps(mapping, start, size)) return ALREADY_MAPPED;
    if (mmap((void *)start, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->memory.fd, 0) == MAP_FAILED)
        return OPERATING_SYSTEM;
    add_range(&mappings, start, size, handle->memory.device);
    count_live(LIVE_MAPPINGS, 1);
    return SUCCESS;
}

CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUhandle id, unsigned long long flags)
{
    ENTER(cuMemMap);
    if (offset || flags) return INVALID_VALUE;
    pthread_mutex_lock(&tables);
    CUresult result = map_locked(start, size, id);
    pthread_mutex_unlock(&tables);
    return result;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t size)
{
    ENTER(cuMemUnmap);
    size_t covered = 0;
    pthread_mutex_lock(&tables);
    for (struct range *mapping = mappings; mapping; mapping = mapping->next)
        if (mapping->start >= start && mapping->start + mapping->size <= start + size) covered += mapping->size;
    if (covered == size)
        for (struct range **place = &mappings; *place;) {
            struct range *mapping = *place;
            if (!overlaps(mapping, start, size)) {
                place = &mapping->next;
                continue;
            }
            mmap((void *)mapping->start, mapping->size, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            remove_range(place);
            count_live(LIVE_MAPPINGS, -1);
        }
    pthread_mutex_unlock(&tables);
    return covered == size ? SUCCESS : INVALID_VALUE;
}

static CUresult set_access_locked(CUdeviceptr start, size_t size, const struct access_description *wanted)
{
    int flags = wanted->flags;
    if (flags != 0 && flags != ACCESS_READ && flags != ACCESS_READ_WRITE) return INVALID_VALUE;
    if (wanted->location.type != LOCATION_DEVICE) return INVALID_VALUE;
    int device = physical(wanted->location.id);
    if (device < 0) return INVALID_DEVICE;
    if (!has_context(device)) return INVALID_CONTEXT;
    for (CUdeviceptr at = start; at < start + size;) {
        struct range *mapping = mapping_at(at);
        if (!mapping || mapping->start != at || mapping->start + mapping->size > start + size) return INVALID_VALUE;
        if (mapping->device != device) return INVALID_DEVICE; /* no peer access here */
        at += mapping->size;
    }
    for (CUdeviceptr at = start; at < start + size;) {
        struct range *mapping = mapping_at(at);
        int protection = (flags ? PROT_READ : 0) | (flags == ACCESS_READ_WRITE ? PROT_WRITE : 0);
        if (mprotect((void *)at, mapping->size, protection)) return OPERATING_SYSTEM;
        mapping->access = flags;
        at += mapping->size;
    }
    return SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const struct access_description *wanted, size_t count)
{
    ENTER(cuMemSetAccess);
    CUresult result = count ? SUCCESS : INVALID_VALUE;
    pthread_mutex_lock(&tables);
    for (size_t i = 0; i < count && result == SUCCESS; i++) result = set_access_locked(start, size, &wanted[i]);
    pthread_mutex_unlock(&tables);
    return result;
}
