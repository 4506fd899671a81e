/*
 * firstbyte COMMAND [ARG...]: prints the milliseconds from the start of COMMAND to the first byte of its standard output.
 * COMMAND has two seconds to end by itself, then it and its process group are killed.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FIRST_BYTE_MS = 120000, END_MS = 2000, STEP_MS = 20 };

static long long now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

int main(int argc, char **argv)
{
	int out[2], ended = 0;
	char byte;

	if (argc < 2 || pipe(out) != 0)
		return 2;
	long long start = now_us();
	pid_t child = fork();
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
	int came = poll(&ready, 1, FIRST_BYTE_MS) == 1 && read(out[0], &byte, 1) == 1;
	long long end = now_us();

	for (int waited = 0; came && !ended && waited < END_MS; waited += STEP_MS) {
		usleep(STEP_MS * 1000);
		ended = waitpid(child, NULL, WNOHANG) == child;
	}
	if (!ended) {
		kill(-child, SIGKILL);
		waitpid(child, NULL, 0);
	}
	if (!came) {
		fprintf(stderr, "firstbyte: %s: no output\n", argv[1]);
		return 1;
	}
	printf("%.1f\n", (end - start) / 1000.0);
	return 0;
}
