// SPDX-License-Identifier: Apache-2.0
// How a host clears a fault that all ranks share, and what the blocks of its rank's calls see of that
// (src/cuda/exchange/faults.cpp, src/cuda/device/wait.cuh).
//
// Checked: the blocks of a call agree on whether it is refused, and the call behind the clearing is
// not. Where they did not agree, some would wait for ranks that have given the call up.
//
// The first call raises the fault. Replays are queued behind it, which the host does not see; it
// hears of the fault by the next call that it makes itself, in a stream that comes behind them. Each
// block looks once. Calls follow each other: no block begins before the call before has ended.
//
// Left out: the other ranks, and the blocks that see in their waits what others have found.
//
// Mutations, each of which makes the check fail:
//   CLEARS_EARLY      the host waits for the call with the fault, and not for those queued behind it
//   CLEARS_NEVER      the host does not clear the fault
#ifndef REPLAYS
#define REPLAYS 2
#endif
#define LAST (REPLAYS + 1)  // the host's own call
#define BLOCKS 2

bool is_stopped;
bool is_queued;  // the host's call; all others are
byte ended[LAST + 1];
byte refused[LAST + 1];
byte good[LAST + 1];

proctype block() {
  byte call;
  do
  :: call > LAST -> break
  :: call <= LAST ->
     (call == 0 || ended[call - 1] == BLOCKS) && (call < LAST || is_queued);
     if
     :: call == 0 -> is_stopped = true
     :: call > 0 ->
        atomic {
          if
          :: is_stopped -> refused[call]++
          :: else -> good[call]++
          fi
        };
        assert(refused[call] == 0 || good[call] == 0);
        assert(call < LAST || refused[call] == 0)
     fi;
     ended[call]++;
     call++
  od
}

proctype host() {
#ifdef CLEARS_EARLY
  ended[0] == BLOCKS;
#else
  ended[LAST - 1] == BLOCKS;
#endif
#ifndef CLEARS_NEVER
  is_stopped = false;
#endif
  is_queued = true
}

init {
  atomic {
    byte i;
    for (i : 1 .. BLOCKS) {
      run block()
    }
    run host()
  }
}
