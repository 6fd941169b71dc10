/* Notes, beside each file, how many of its bytes have been synced: what a power cut would leave. Loaded with LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static void note(int fd) {
    char link[64], path[4096], mark[4200];
    struct stat at;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0 || fstat(fd, &at) != 0 || !S_ISREG(at.st_mode)) return;
    path[length] = 0;
    snprintf(mark, sizeof mark, "%s.synced", path);
    FILE *out = fopen(mark, "w");
    if (out == NULL) return;
    fprintf(out, "%lld", (long long)at.st_size);
    fclose(out);
}

int fdatasync(int fd) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync");
    int result = real(fd);
    if (result == 0) note(fd);
    return result;
}

int fsync(int fd) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    int result = real(fd);
    if (result == 0) note(fd);
    return result;
}
