/* The seam: between the programs and the C library. See seam.py, which builds it and holds its other half.

   Every function here has the name of one of the C library's, is found before it (LD_PRELOAD), and asks `fails` first.
   Calls are counted where they are about a file below `root`, ask for at least `least` bytes of memory on behalf of
   NumPy or PyTorch, or start a process or a thread. The counters lie in a file that all processes of a run
   have mapped, so that n counts the calls of all of them together. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN, MAKE, READ, WRITE, CHANGE, LOOK, LOCK, CLOSE, MAP, MEMORY, START };
enum { THROUGH, ERROR, SHORT, SLOW, SIGNAL_MAIN, SIGNAL_GROUP, SIGNAL_SELF, HANG, CLOCK, PAUSE };

struct State { /* as in seam.py: eight bytes each, then texts */
    int64_t armed, main, mask, action, value, first, times, least, count, fired;
    char root[256], below[256], where[256], what[64], list[256];
};
static struct State *state;
#define FDS 65536
static unsigned char ours[FDS]; /* of each descriptor: 1 it is counted, 2 it is written to */

static int begun;
static void begin(void) {
    if (begun) return;
    begun = 1;
    const char *name = getenv("WSI_TEST_SEAM");
    if (!name) return;
    int fd = syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *there = (void *)syscall(SYS_mmap, 0, sizeof(struct State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (there != MAP_FAILED) state = there;
}
__attribute__((constructor)) static void constructed(void) { begin(); }

static int under(const char *folder, const char *path) {
    size_t n = strlen(folder);
    return n && !strncmp(folder, path, n) && (path[n] == '/' || !path[n]);
}

/* The whole name of a path, or nothing where it is not counted. */
static const char *counted_at(int at, const char *path, char *room) {
    if (!state || !state->armed || !path) return 0;
    if (path[0] != '/') {
        char link[40];
        long n;
        if (at == AT_FDCWD) {
            n = syscall(SYS_getcwd, room, 2048);
            if (n <= 0) return 0;
            n--;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            n = syscall(SYS_readlink, link, room, 2047);
            if (n <= 0) return 0;
        }
        snprintf(room + n, 2048, "/%s", path);
    } else
        snprintf(room, 4096, "%s", path);
    return under(state->root, room) ? room : 0;
}

static void hang(void) {
    struct timespec long_time = {3600, 0};
    for (;;) syscall(SYS_nanosleep, &long_time, 0);
}

static void noted(const char *what, const char *where) {
    if (__sync_bool_compare_and_swap(&state->what[0], 0, what[0])) {
        snprintf(state->what, sizeof state->what, "%s", what);
        snprintf(state->where, sizeof state->where, "%s", where ? where : "");
    }
}

/* One line for each call, in the file that is asked for. */
static void listed(int op, const char *what, const char *where) {
    char line[4400];
    int error = errno, fd = syscall(SYS_openat, AT_FDCWD, state->list, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) {
        syscall(SYS_write, fd, line, snprintf(line, sizeof line, "%d\t%s\t%s\n", op, what, where ? where : ""));
        syscall(SYS_close, fd);
    }
    errno = error;
}

/* Whether a call fails, with errno set; -1 where it is to be short. All else that is done at the n-th is done here. */
static int fails(int op, const char *what, const char *where) {
    if (!state || !state->armed) return 0;
    if (state->below[0] && !(where && under(state->below, where))) return 0;
    if (state->list[0]) listed(op, what, where);
    if (!(state->mask >> op & 1)) return 0;
    int64_t number = __sync_add_and_fetch(&state->count, 1);
    if (number < state->first || number >= state->first + state->times) return 0;
    if (state->action == THROUGH) return 0;
    noted(what, where);
    __sync_fetch_and_add(&state->fired, 1);
    switch (state->action) {
    case ERROR: errno = state->value; return 1;
    case SHORT: return -1;
    case SLOW: {
        struct timespec pause = {0, state->value * 1000};
        syscall(SYS_nanosleep, &pause, 0);
        return 0;
    }
    case SIGNAL_MAIN: syscall(SYS_kill, state->main, state->value); return 0;
    case SIGNAL_GROUP: syscall(SYS_kill, 0, state->value); return 0;
    case SIGNAL_SELF:
        signal(state->value, SIG_DFL);
        syscall(SYS_kill, getpid(), state->value);
        hang();
    case HANG: /* a process that was begun to read; nobody can help the first, but who began it */
        if (getpid() != state->main) hang();
        return 0;
    case PAUSE: /* until the other run is over, which the seam lets through */
        while (state->armed == 1 && state->value) {
            struct timespec pause = {0, 2000000};
            syscall(SYS_nanosleep, &pause, 0);
        }
    }
    return 0;
}

static const char *name_of(int fd, char *room) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlink, link, room, 2047);
    room[n > 0 ? n : 0] = 0;
    return room;
}
static int is_ours(int fd) { return fd >= 0 && fd < FDS && ours[fd]; }
static int fd_fails(int op, const char *what, int fd) {
    char room[4096];
    if (!state || !state->armed || !is_ours(fd)) return 0;
    return fails(op, what, name_of(fd, room));
}
static int path_fails(int op, const char *what, int at, const char *path) {
    char room[4096];
    const char *whole = counted_at(at, path, room);
    return whole ? fails(op, what, whole) : 0;
}
static void kept(int fd, const char *whole, int flags) {
    if (fd >= 0 && fd < FDS) ours[fd] = whole ? 1 | (flags & O_ACCMODE ? 2 : 0) : 0;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* -- opening */
static int opened(const char *what, int at, const char *path, int flags, mode_t mode) {
    char room[4096];
    const char *whole = counted_at(at, path, room);
    int writes = flags & O_ACCMODE || flags & O_CREAT;
    if (whole && fails(writes ? MAKE : OPEN, what, whole) > 0) return -1;
    int fd = syscall(SYS_openat, at, path, flags, mode);
    kept(fd, whole, flags);
    return fd;
}
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list l; va_start(l, flags); mode = va_arg(l, mode_t); va_end(l); }
int open(const char *path, int flags, ...) { MODE return opened("open", AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened("open", AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE return opened("openat", at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE return opened("openat", at, path, flags, mode); }
int __open_2(const char *path, int flags) { return opened("open", AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened("open", AT_FDCWD, path, flags, 0); }
int creat(const char *path, mode_t mode) { return opened("creat", AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }
static int flags_of(const char *mode) { return mode[0] == 'r' && !strchr(mode, '+') ? O_RDONLY : O_RDWR; }
#define FOPEN(name)                                                                                                    \
    FILE *name(const char *path, const char *mode) {                                                                   \
        REAL(name);                                                                                                    \
        char room[4096];                                                                                               \
        const char *whole = counted_at(AT_FDCWD, path, room);                                                          \
        if (whole && fails(flags_of(mode) ? MAKE : OPEN, #name, whole) > 0) return 0;                       \
        FILE *file = real(path, mode);                                                                                 \
        if (file) kept(fileno(file), whole, flags_of(mode));                                                           \
        return file;                                                                                                   \
    }
FOPEN(fopen)
FOPEN(fopen64)
int mkstemp64(char *pattern) { REAL(mkstemp64); return path_fails(MAKE, "mkstemp", AT_FDCWD, pattern) > 0 ? -1 : real(pattern); }
int mkstemp(char *pattern) { REAL(mkstemp); return path_fails(MAKE, "mkstemp", AT_FDCWD, pattern) > 0 ? -1 : real(pattern); }
int mkstemps64(char *pattern, int end) { REAL(mkstemps64); return path_fails(MAKE, "mkstemps", AT_FDCWD, pattern) > 0 ? -1 : real(pattern, end); }
int mkstemps(char *pattern, int end) { REAL(mkstemps); return path_fails(MAKE, "mkstemps", AT_FDCWD, pattern) > 0 ? -1 : real(pattern, end); }
static void copied(int from, int to) { if (to >= 0 && to < FDS) ours[to] = is_ours(from) ? ours[from] : 0; }
int dup(int fd) { int to = syscall(SYS_dup, fd); copied(fd, to); return to; }
int dup2(int fd, int to) { REAL(dup2); int n = real(fd, to); if (n >= 0) copied(fd, n); return n; }
int dup3(int fd, int to, int flags) { int n = syscall(SYS_dup3, fd, to, flags); if (n >= 0) copied(fd, n); return n; }
static int controlled(int fd, int command, void *argument) {
    if ((command == F_SETLK || command == F_SETLKW) && fd_fails(LOCK, "fcntl", fd) > 0) return -1;
    int n = syscall(SYS_fcntl, fd, command, argument);
    if (n >= 0 && (command == F_DUPFD || command == F_DUPFD_CLOEXEC)) copied(fd, n);
    return n;
}
#define ARGUMENT va_list l; va_start(l, command); void *argument = va_arg(l, void *); va_end(l);
int fcntl(int fd, int command, ...) { ARGUMENT return controlled(fd, command, argument); }
int fcntl64(int fd, int command, ...) { ARGUMENT return controlled(fd, command, argument); }
int flock(int fd, int how) { return fd_fails(LOCK, "flock", fd) > 0 ? -1 : syscall(SYS_flock, fd, how); }
int close(int fd) {
    int failed = is_ours(fd) && ours[fd] & 2 && fd_fails(CLOSE, "close", fd) > 0, error = errno;
    if (fd >= 0 && fd < FDS) ours[fd] = 0;
    int n = syscall(SYS_close, fd);
    if (failed) { errno = error; return -1; }
    return n;
}
int fclose(FILE *file) {
    REAL(fclose);
    int fd = fileno(file), failed = is_ours(fd) && ours[fd] & 2 && fd_fails(CLOSE, "fclose", fd) > 0, error = errno;
    if (fd >= 0 && fd < FDS) ours[fd] = 0;
    int n = real(file);
    if (failed) { errno = error; return EOF; }
    return n;
}

/* -- reading and writing */
static size_t part(size_t size) { return size > 1 ? (size + 1) / 2 : size; }
#define MOVE(name, op, ...)                                                                                            \
    REAL(name);                                                                                                        \
    int how = fd_fails(op, #name, fd);                                                                                 \
    if (how > 0) return -1;                                                                                            \
    if (how < 0) size = part(size);                                                                                    \
    return real(__VA_ARGS__);
ssize_t read(int fd, void *to, size_t size) { MOVE(read, READ, fd, to, size) }
ssize_t pread(int fd, void *to, size_t size, off_t at) { MOVE(pread, READ, fd, to, size, at) }
ssize_t pread64(int fd, void *to, size_t size, off64_t at) { MOVE(pread64, READ, fd, to, size, at) }
ssize_t write(int fd, const void *from, size_t size) { MOVE(write, WRITE, fd, from, size) }
ssize_t pwrite(int fd, const void *from, size_t size, off_t at) { MOVE(pwrite, WRITE, fd, from, size, at) }
ssize_t pwrite64(int fd, const void *from, size_t size, off64_t at) { MOVE(pwrite64, WRITE, fd, from, size, at) }
#define MOVEV(name, op, single, ...)                                                                                   \
    REAL(name);                                                                                                        \
    int how = fd_fails(op, #name, fd);                                                                                 \
    if (how > 0) return -1;                                                                                            \
    struct iovec less;                                                                                                 \
    if (how < 0 && parts > 0) { less = v[0]; less.iov_len = part(less.iov_len); v = &less; parts = 1; }                \
    return real(__VA_ARGS__);
ssize_t readv(int fd, const struct iovec *v, int parts) { MOVEV(readv, READ, read, fd, v, parts) }
ssize_t preadv(int fd, const struct iovec *v, int parts, off_t at) { MOVEV(preadv, READ, pread, fd, v, parts, at) }
ssize_t preadv64(int fd, const struct iovec *v, int parts, off64_t at) { MOVEV(preadv64, READ, pread, fd, v, parts, at) }
ssize_t preadv2(int fd, const struct iovec *v, int parts, off_t at, int flags) { MOVEV(preadv2, READ, pread, fd, v, parts, at, flags) }
ssize_t preadv64v2(int fd, const struct iovec *v, int parts, off64_t at, int flags) { MOVEV(preadv64v2, READ, pread, fd, v, parts, at, flags) }
ssize_t writev(int fd, const struct iovec *v, int parts) { MOVEV(writev, WRITE, write, fd, v, parts) }
ssize_t pwritev(int fd, const struct iovec *v, int parts, off_t at) { MOVEV(pwritev, WRITE, pwrite, fd, v, parts, at) }
ssize_t pwritev64(int fd, const struct iovec *v, int parts, off64_t at) { MOVEV(pwritev64, WRITE, pwrite, fd, v, parts, at) }
ssize_t pwritev2(int fd, const struct iovec *v, int parts, off_t at, int flags) { MOVEV(pwritev2, WRITE, pwrite, fd, v, parts, at, flags) }
ssize_t pwritev64v2(int fd, const struct iovec *v, int parts, off64_t at, int flags) { MOVEV(pwritev64v2, WRITE, pwrite, fd, v, parts, at, flags) }
ssize_t sendfile(int fd, int from, off_t *at, size_t size) { MOVE(sendfile, WRITE, fd, from, at, size) }
ssize_t sendfile64(int fd, int from, off64_t *at, size_t size) { MOVE(sendfile64, WRITE, fd, from, at, size) }
ssize_t copy_file_range(int from, off64_t *at, int fd, off64_t *to, size_t size, unsigned flags) { MOVE(copy_file_range, WRITE, from, at, fd, to, size, flags) }
#define STREAM(name, op, type)                                                                                         \
    size_t name(type data, size_t size, size_t count, FILE *file) {                                                    \
        REAL(name);                                                                                                    \
        int how = fd_fails(op, #name, fileno(file));                                                                   \
        if (how > 0) { file->_flags |= 0x20; return 0; } /* as the C library marks an error; short ones it repeats */  \
        return real(data, size, count, file);                                                                          \
    }
STREAM(fread, READ, void *)
STREAM(fwrite, WRITE, const void *)

/* -- changing, looking */
#define CHANGED(op, type, name, at, path, parameters, ...)                                                             \
    type name parameters { REAL(name); return path_fails(op, #name, at, path) > 0 ? -1 : real(__VA_ARGS__); }
CHANGED(CHANGE, int, rename, AT_FDCWD, to, (const char *from, const char *to), from, to)
CHANGED(CHANGE, int, renameat, a, to, (int b, const char *from, int a, const char *to), b, from, a, to)
CHANGED(CHANGE, int, renameat2, a, to, (int b, const char *from, int a, const char *to, unsigned f), b, from, a, to, f)
CHANGED(CHANGE, int, unlink, AT_FDCWD, path, (const char *path), path)
CHANGED(CHANGE, int, unlinkat, at, path, (int at, const char *path, int f), at, path, f)
CHANGED(CHANGE, int, mkdir, AT_FDCWD, path, (const char *path, mode_t m), path, m)
CHANGED(CHANGE, int, mkdirat, at, path, (int at, const char *path, mode_t m), at, path, m)
CHANGED(CHANGE, int, rmdir, AT_FDCWD, path, (const char *path), path)
CHANGED(CHANGE, int, link, AT_FDCWD, to, (const char *from, const char *to), from, to)
CHANGED(CHANGE, int, linkat, a, to, (int b, const char *from, int a, const char *to, int f), b, from, a, to, f)
CHANGED(CHANGE, int, symlink, AT_FDCWD, to, (const char *from, const char *to), from, to)
CHANGED(CHANGE, int, symlinkat, at, to, (const char *from, int at, const char *to), from, at, to)
CHANGED(CHANGE, int, truncate, AT_FDCWD, path, (const char *path, off_t n), path, n)
CHANGED(CHANGE, int, truncate64, AT_FDCWD, path, (const char *path, off64_t n), path, n)
CHANGED(CHANGE, int, chmod, AT_FDCWD, path, (const char *path, mode_t m), path, m)
CHANGED(CHANGE, int, fchmodat, at, path, (int at, const char *path, mode_t m, int f), at, path, m, f)
CHANGED(CHANGE, int, utimensat, at, path, (int at, const char *path, const struct timespec t[2], int f), at, path, t, f)
CHANGED(LOOK, int, stat, AT_FDCWD, path, (const char *path, struct stat *s), path, s)
CHANGED(LOOK, int, stat64, AT_FDCWD, path, (const char *path, struct stat64 *s), path, s)
CHANGED(LOOK, int, lstat, AT_FDCWD, path, (const char *path, struct stat *s), path, s)
CHANGED(LOOK, int, lstat64, AT_FDCWD, path, (const char *path, struct stat64 *s), path, s)
CHANGED(LOOK, int, fstatat, at, path, (int at, const char *path, struct stat *s, int f), at, path, s, f)
CHANGED(LOOK, int, fstatat64, at, path, (int at, const char *path, struct stat64 *s, int f), at, path, s, f)
CHANGED(LOOK, int, statx, at, path, (int at, const char *path, int f, unsigned m, struct statx *s), at, path, f, m, s)
CHANGED(LOOK, int, access, AT_FDCWD, path, (const char *path, int m), path, m)
CHANGED(LOOK, int, faccessat, at, path, (int at, const char *path, int m, int f), at, path, m, f)
DIR *opendir(const char *path) { REAL(opendir); return path_fails(LOOK, "opendir", AT_FDCWD, path) > 0 ? 0 : real(path); }
DIR *fdopendir(int fd) { REAL(fdopendir); return fd_fails(LOOK, "fdopendir", fd) > 0 ? 0 : real(fd); }
#define HELD(op, type, name, failed, parameters, ...)                                                                  \
    type name parameters { REAL(name); return fd_fails(op, #name, fd) > 0 ? (failed) : real(__VA_ARGS__); }
HELD(CHANGE, int, ftruncate, -1, (int fd, off_t n), fd, n)
HELD(CHANGE, int, ftruncate64, -1, (int fd, off64_t n), fd, n)
HELD(CHANGE, int, fallocate, -1, (int fd, int m, off_t at, off_t n), fd, m, at, n)
HELD(CHANGE, int, fallocate64, -1, (int fd, int m, off64_t at, off64_t n), fd, m, at, n)
HELD(CHANGE, int, posix_fallocate, errno, (int fd, off_t at, off_t n), fd, at, n)
HELD(CHANGE, int, posix_fallocate64, errno, (int fd, off64_t at, off64_t n), fd, at, n)
HELD(CHANGE, int, fchmod, -1, (int fd, mode_t m), fd, m)
HELD(CHANGE, int, futimens, -1, (int fd, const struct timespec t[2]), fd, t)
/* Nothing here survives the machine, so nothing waits for its disk. */
int fsync(int fd) { if (fd_fails(CHANGE, "fsync", fd) > 0) return -1; return state ? 0 : syscall(SYS_fsync, fd); }
int fdatasync(int fd) { if (fd_fails(CHANGE, "fdatasync", fd) > 0) return -1; return state ? 0 : syscall(SYS_fdatasync, fd); }

/* -- memory */
static int asked_by(void *caller) {
    static const char *const known[] = {"numpy", 0};
    Dl_info about;
    if (!dladdr(caller, &about) || !about.dli_fname) return 0;
    const char *file = strrchr(about.dli_fname, '/');
    file = file ? file : about.dli_fname;
    for (int i = 0; known[i]; i++)
        if (strstr(file, known[i])) return 1;
    return strstr(about.dli_fname, "/numpy") != 0;
}
static __thread int within;
static int no_memory(size_t size, const char *what, void *caller) {
    if (!state || !state->armed || (int64_t)size < state->least || within) return 0;
    within = 1;
    int failed = asked_by(caller) && fails(MEMORY, what, 0) > 0;
    within = 0;
    if (failed) errno = ENOMEM;
    return failed;
}
#define CALLER __builtin_return_address(0)
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
void *malloc(size_t size) { return no_memory(size, "malloc", CALLER) ? 0 : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return no_memory(n * size, "calloc", CALLER) ? 0 : __libc_calloc(n, size); }
void *realloc(void *from, size_t size) { return no_memory(size, "realloc", CALLER) ? 0 : __libc_realloc(from, size); }
void *memalign(size_t to, size_t size) { return no_memory(size, "memalign", CALLER) ? 0 : __libc_memalign(to, size); }
void *aligned_alloc(size_t to, size_t size) { return no_memory(size, "aligned_alloc", CALLER) ? 0 : __libc_memalign(to, size); }
/* PyTorch asks for tensors by this one alone. */
int posix_memalign(void **there, size_t to, size_t size) {
    if (state && state->armed && (int64_t)size >= state->least && fails(MEMORY, "posix_memalign", 0) > 0) return ENOMEM;
    void *found = __libc_memalign(to, size);
    if (!found) return ENOMEM;
    *there = found;
    return 0;
}
static int no_map(int fd, size_t size, void *caller) {
    if (fd >= 0) return fd_fails(MAP, "mmap", fd) > 0;
    return no_memory(size, "mmap", caller);
}
void *mmap(void *a, size_t size, int p, int f, int fd, off_t at) { REAL(mmap); return no_map(fd, size, CALLER) ? MAP_FAILED : real(a, size, p, f, fd, at); }
void *mmap64(void *a, size_t size, int p, int f, int fd, off64_t at) { REAL(mmap64); return no_map(fd, size, CALLER) ? MAP_FAILED : real(a, size, p, f, fd, at); }

/* -- processes and threads */
pid_t fork(void) { REAL(fork); return fails(START, "fork", 0) > 0 ? -1 : real(); }
pid_t vfork(void) { REAL(fork); return fails(START, "vfork", 0) > 0 ? -1 : real(); }
int execve(const char *path, char *const a[], char *const e[]) { REAL(execve); return fails(START, "execve", path) > 0 ? -1 : real(path, a, e); }
int posix_spawn(pid_t *p, const char *path, const posix_spawn_file_actions_t *f, const posix_spawnattr_t *s, char *const a[], char *const e[]) {
    REAL(posix_spawn);
    return fails(START, "posix_spawn", path) > 0 ? errno : real(p, path, f, s, a, e);
}
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*run)(void *), void *with) {
    REAL(pthread_create);
    return fails(START, "pthread_create", 0) > 0 ? errno : real(t, a, run, with);
}

/* -- the clock of the wall, which jumps at the n-th call */
static time_t jump(void) { return state && state->armed && state->action == CLOCK && state->fired ? state->value : 0; }
int clock_gettime(clockid_t clock, struct timespec *t) {
    REAL(clock_gettime);
    int n = real(clock, t);
    if (!n && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec += jump();
    return n;
}
int gettimeofday(struct timeval *t, void *zone) { REAL(gettimeofday); int n = real(t, zone); if (!n) t->tv_sec += jump(); return n; }
time_t time(time_t *there) { struct timespec t; syscall(SYS_clock_gettime, CLOCK_REALTIME, &t); time_t now = t.tv_sec + jump(); if (there) *there = now; return now; }
