// SPDX-License-Identifier: Apache-2.0
// What the models of both executors share: the ranks, and what may happen to them.
//
// The ranks are alike, so rank 0 is the one that something happens to: it is halted at any moment
// and goes on at any later one, or dies at any moment. From then on deadlines may pass, each by
// itself; nothing else lets one pass. So while all ranks come, a wait that cannot end is a deadlock,
// and the checker reports it.
//
// A model includes this file and has proctypes rank(), started RUNS, and carrier(), by which what a
// rank sends reaches the others.
#ifndef N
#define N 2  // ranks
#endif
#ifndef C
#define C 3  // calls
#endif
#ifndef MAX_REFUSALS
#define MAX_REFUSALS 1  // calls that ranks refuse, in all
#endif

#define NOBODY 255
#define EVERY_RANK(rank) rank : 0 .. N - 1
#if N == 2
#define ALL_OF(what) (what(0) && what(1))
#define ANY_OF(what) (what(0) || what(1))
#else
#define ALL_OF(what) (what(0) && what(1) && what(2))
#define ANY_OF(what) (what(0) || what(1) || what(2))
#endif
#define FOR_PEERS(body)    \
  for (EVERY_RANK(peer)) { \
    if                     \
    :: peer != me -> body  \
    :: else                \
    fi                     \
  }                        \
  peer = 0

// One cell or signal for each pair of ranks.
#define CELL(kind, owner, writer) ((kind) * N * N + (owner) * N + (writer))
#define WRITER_OF(cell) ((cell) % N)
#define OWNER_OF(cell) ((cell) / N % N)

#define VICTIM 0
bool is_halted, is_dead;  // VICTIM
bool has_ended[N];        // calls no more

byte refuser[C + 1] = NOBODY;  // of each call
byte num_refusals;
// Whatever a call gave is taken for right.
#define IS_RIGHT assert(refuser[e] == NOBODY)

// init starts the ranks first, so that rank r is process r + 1.
#define RUNS provided (_pid != VICTIM + 1 || !is_halted)
#define START              \
  for (EVERY_RANK(i)) {    \
    run rank(i)            \
  };                       \
  i = 0;                   \
  run carrier();            \
  run fate()

// With ONE_AT_A_TIME nothing happens to rank 0 where a rank refuses a call, and the other way round.
#ifdef ONE_AT_A_TIME
#define MAY_HAPPEN (num_refusals == 0)
#define MAY_REFUSE (num_refusals < MAX_REFUSALS && !has_happened)
#else
#define MAY_HAPPEN true
#define MAY_REFUSE (num_refusals < MAX_REFUSALS)
#endif
bool has_happened;

proctype fate() {
  if
  :: atomic { MAY_HAPPEN -> is_halted = true; has_happened = true }; is_halted = false
  :: atomic { MAY_HAPPEN -> is_dead = true; has_happened = true }
  :: true
  fi
}
