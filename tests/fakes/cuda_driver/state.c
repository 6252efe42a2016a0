/* The shared file, this process's row in it, injected faults, and the accounting of device memory.
 *
 * Memory of a device is a memfd whose name tells machine, device and size. It is in use as long as any process has a
 * descriptor or a mapping of it: used_bytes() looks into /proc, so nothing has to be cleaned up after a SIGKILL. */
#define _GNU_SOURCE
#include "fake.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct shared *state;
struct process_row *self;
pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER;

static int state_fd = -1;
static int is_initialized, is_forked, sticky_error;
static int visible[MAX_DEVICES], count_visible;
static char command[4096];
static const char *const call_names[] = {
#define AS_TEXT(name) #name,
    CALLS(AS_TEXT)
};

static void after_fork(void) { is_forked = 1; } /* as with the real one: a child has no driver */

uint64_t start_time_of(int pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    char *rest = strrchr(text, ')');
    if (!rest || strchr("ZX", rest[2])) return 0;
    unsigned long long value = 0;
    sscanf(rest + 2, "%*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &value);
    return value;
}

static void read_command(void)
{
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, command, sizeof command - 1);
    if (fd >= 0) close(fd);
    for (ssize_t i = 0; i < length; i++)
        if (!command[i]) command[i] = ' ';
}

static void claim_row(void)
{
    flock(state_fd, LOCK_EX);
    for (int pass = 0; pass < 2 && !self; pass++)
        for (int i = 0; i < MAX_PROCESSES && !self; i++) {
            struct process_row *row = &state->processes[i];
            if (row->pid && (!pass || start_time_of((int)row->pid) == row->start_time)) continue;
            memset(row, 0, sizeof *row);
            row->start_time = start_time_of(getpid());
            size_t length = strlen(command);
            const char *tail = command + (length >= sizeof row->command ? length - sizeof row->command + 1 : 0);
            strcpy(row->command, tail);
            row->pid = (uint32_t)getpid();
            self = row;
        }
    flock(state_fd, LOCK_UN);
}

static int matches_uuid(const struct device_row *device, const char *text)
{
    char hex[64];
    const uint8_t *u = device->uuid;
    snprintf(hex, sizeof hex, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             device->flags & IS_MIG ? "MIG" : "GPU", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9],
             u[10], u[11], u[12], u[13], u[14], u[15]);
    return strlen(text) > 4 && !strncasecmp(hex, text, strlen(text));
}

/* A process uses one MIG instance, the first that it could see, and then no other device. */
static void keep_one_instance(void)
{
    for (int i = 0; i < count_visible; i++)
        if (state->devices[visible[i]].flags & IS_MIG) {
            visible[0] = visible[i];
            count_visible = 1;
        }
}

/* CUDA_VISIBLE_DEVICES: indices or beginnings of UUIDs; the first that means nothing ends the list. */
static void read_visible(void)
{
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    count_visible = 0;
    if (!wanted) {
        for (uint32_t i = 0; i < state->num_devices; i++) visible[count_visible++] = (int)i;
        keep_one_instance();
        return;
    }
    char text[1024];
    snprintf(text, sizeof text, "%s", wanted);
    char *place = NULL;
    for (char *word = strtok_r(text, ", ", &place); word && count_visible < MAX_DEVICES;
         word = strtok_r(NULL, ", ", &place)) {
        char *end;
        long index = strtol(word, &end, 10);
        int found = -1;
        if (!*end && index >= 0 && index < (long)state->num_devices) found = (int)index;
        for (uint32_t i = 0; *end && i < state->num_devices && found < 0; i++)
            if (matches_uuid(&state->devices[i], word)) found = (int)i;
        if (found < 0) break;
        visible[count_visible++] = found;
    }
    keep_one_instance();
}

static CUresult open_state(void)
{
    const char *path = getenv("FAKE_CUDA_STATE");
    if (!path) return NO_DEVICE;
    state_fd = open(path, O_RDWR | O_CLOEXEC);
    if (state_fd < 0) return NO_DEVICE;
    void *address = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (address == MAP_FAILED || ((struct shared *)address)->magic != MAGIC) return UNKNOWN;
    state = address;
    read_command();
    claim_row();
    return self ? SUCCESS : UNKNOWN;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static CUresult opened;

static void open_once(void)
{
    pthread_atfork(NULL, NULL, after_fork);
    opened = open_state();
}

CUresult fake_start(void)
{
    if (!state->num_devices) return NO_DEVICE;
    if (!is_initialized) read_visible();
    is_initialized = 1;
    return count_visible ? SUCCESS : NO_DEVICE;
}

static int is_sticky(int error) { return error == DEVICE_UNAVAILABLE || error == ILLEGAL_ADDRESS || error == UNKNOWN; }

CUresult fake_enter(int call)
{
    if (is_forked) return NOT_INITIALIZED;
    pthread_once(&once, open_once);
    if (opened != SUCCESS) return opened;
    uint32_t number = __atomic_add_fetch(&self->calls[call], 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < MAX_FAULTS; i++) {
        struct fault_row *fault = &state->faults[i];
        if (!fault->error || strcmp(fault->call, call_names[call]) || (fault->nth && fault->nth != number)) continue;
        if (fault->process[0] && !strstr(command, fault->process)) continue;
        __atomic_add_fetch(&fault->num_fired, 1, __ATOMIC_SEQ_CST);
        if (is_sticky(fault->error)) sticky_error = fault->error;
        return fault->error;
    }
    if (sticky_error) return sticky_error;
    if (call != CALL_cuInit && call != CALL_cuDriverGetVersion && !is_initialized) return NOT_INITIALIZED;
    return SUCCESS;
}

void count_live(int what, int change) { __atomic_add_fetch(&self->live[what], (uint32_t)change, __ATOMIC_SEQ_CST); }

int num_visible(void) { return count_visible; }

int physical(CUdevice index) { return index >= 0 && index < count_visible ? visible[index] : -1; }

int visible_index(int device)
{
    for (int i = 0; i < count_visible; i++)
        if (visible[i] == device) return i;
    return -1;
}

struct seen {
    size_t num, room;
    uint64_t *inodes;
};

static int add_once(struct seen *seen, uint64_t inode)
{
    for (size_t i = 0; i < seen->num; i++)
        if (seen->inodes[i] == inode) return 0;
    if (seen->num == seen->room) {
        seen->room = seen->room ? 2 * seen->room : 64;
        seen->inodes = realloc(seen->inodes, seen->room * sizeof *seen->inodes);
    }
    seen->inodes[seen->num++] = inode;
    return 1;
}

/* "/memfd:fakecuda:<machine>:<device>:<size> (deleted)" → size; 0 if it is another's. */
static size_t parse_name(const char *text, int *device)
{
    const char *name = strstr(text, "/memfd:fakecuda:");
    char id[17];
    unsigned long long size;
    if (!name || sscanf(name, "/memfd:fakecuda:%16[^:]:%d:%llu", id, device, &size) != 3) return 0;
    return strncmp(id, state->id, sizeof state->id) ? 0 : (size_t)size;
}

static size_t in_descriptors(const char *pid, int device, struct seen *seen)
{
    char path[600], link[256];
    size_t total = 0;
    snprintf(path, sizeof path, "/proc/%s/fd", pid);
    DIR *folder = opendir(path);
    if (!folder) return 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        snprintf(path, sizeof path, "/proc/%s/fd/%s", pid, entry->d_name);
        ssize_t length = readlink(path, link, sizeof link - 1);
        if (length <= 0) continue;
        link[length] = 0;
        int where;
        size_t size = parse_name(link, &where);
        struct stat found;
        if (size && where == device && !stat(path, &found) && add_once(seen, found.st_ino)) total += size;
    }
    closedir(folder);
    return total;
}

static size_t in_mappings(const char *pid, int device, struct seen *seen)
{
    char path[300], line[512];
    size_t total = 0;
    snprintf(path, sizeof path, "/proc/%s/maps", pid);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        int where;
        size_t size = parse_name(line, &where);
        unsigned long long inode = 0;
        if (size && where == device && sscanf(line, "%*s %*s %*s %*s %llu", &inode) == 1 && add_once(seen, inode))
            total += size;
    }
    fclose(file);
    return total;
}

size_t used_bytes(int device)
{
    struct seen seen = {0};
    size_t total = 0;
    DIR *folder = opendir("/proc");
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9') {
            total += in_descriptors(entry->d_name, device, &seen);
            total += in_mappings(entry->d_name, device, &seen);
        }
    if (folder) closedir(folder);
    free(seen.inodes);
    return total;
}

/* Takes memory of a device if it has that much; one process at a time. */
CUresult take_memory(int device, size_t size, struct memory *out)
{
    char name[128];
    CUresult result = OUT_OF_MEMORY;
    snprintf(name, sizeof name, "fakecuda:%.16s:%d:%zu", state->id, device, size);
    flock(state_fd, LOCK_EX);
    if (used_bytes(device) + size <= state->devices[device].total_bytes) {
        int fd = memfd_create(name, MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)size)) {
            if (fd >= 0) close(fd);
            result = OPERATING_SYSTEM;
        } else {
            *out = (struct memory){fd, device, size};
            result = SUCCESS;
        }
    }
    flock(state_fd, LOCK_UN);
    return result;
}

/* Memory by its inode, as a fabric handle names it: while anybody has a descriptor of it. */
CUresult find_memory(uint64_t inode, struct memory *out)
{
    CUresult result = INVALID_HANDLE;
    DIR *processes = opendir("/proc");
    for (struct dirent *process; processes && result != SUCCESS && (process = readdir(processes));) {
        char path[600], link[256];
        if (process->d_name[0] < '0' || process->d_name[0] > '9') continue;
        snprintf(path, sizeof path, "/proc/%s/fd", process->d_name);
        DIR *folder = opendir(path);
        for (struct dirent *entry; folder && result != SUCCESS && (entry = readdir(folder));) {
            snprintf(path, sizeof path, "/proc/%s/fd/%s", process->d_name, entry->d_name);
            ssize_t length = readlink(path, link, sizeof link - 1);
            int device;
            struct stat found;
            if (length <= 0) continue;
            link[length] = 0;
            if (!parse_name(link, &device) || stat(path, &found) || found.st_ino != inode) continue;
            int fd = open(path, O_RDWR | O_CLOEXEC);
            if (fd < 0) continue;
            result = open_memory(fd, out);
            close(fd);
        }
        if (folder) closedir(folder);
    }
    if (processes) closedir(processes);
    return result;
}

/* Takes a reference to memory behind somebody's descriptor, which stays theirs. */
CUresult open_memory(int fd, struct memory *out)
{
    char path[64], link[256];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, link, sizeof link - 1);
    if (length <= 0) return INVALID_VALUE;
    link[length] = 0;
    int device;
    size_t size = parse_name(link, &device);
    if (!size) return INVALID_VALUE;
    if (visible_index(device) < 0) return INVALID_DEVICE;
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return OPERATING_SYSTEM;
    *out = (struct memory){own, device, size};
    return SUCCESS;
}
