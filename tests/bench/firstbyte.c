/*
 * firstbyte COMMAND [ARG...]: the time from the start of COMMAND to the first byte of its standard output, in
 * microseconds, then the CPU time that it had taken when it was killed. COMMAND and its group are killed at that byte.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const int limit_ms = 60000;

static long long now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static long long us(struct timeval t)
{
	return t.tv_sec * 1000000LL + t.tv_usec;
}

int main(int argc, char **argv)
{
	int out[2], status;
	char byte;
	struct rusage use;
	long long start, end;
	pid_t child;

	if (argc < 2 || pipe(out) != 0)
		return 2;
	start = now_us();
	child = fork();
	if (child < 0)
		return 2;
	if (child == 0) {
		setpgid(0, 0);
		dup2(out[1], 1);
		close(out[0]);
		close(out[1]);
		execvp(argv[1], argv + 1);
		_exit(127);
	}
	close(out[1]);
	struct pollfd ready = { .fd = out[0], .events = POLLIN };
	int came = poll(&ready, 1, limit_ms) == 1 && read(out[0], &byte, 1) == 1;
	end = now_us();
	kill(-child, SIGKILL);
	wait4(child, &status, 0, &use);
	if (!came) {
		fprintf(stderr, "firstbyte: %s: no output\n", argv[1]);
		return 1;
	}
	printf("%lld %lld\n", end - start, us(use.ru_utime) + us(use.ru_stime));
	return 0;
}
