// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs that use two exchanges and come to different ones first when a rank is lost
// (src/cuda/exchange/loss_watch.hpp). A rank has a host, which settles both in any order and then may
// take a new process in, as all do or none; and for each exchange a watcher, which answers in its
// place while the host waits in the other one, for others to agree or in a call.
//
// Checked: every rank gets through both exchanges, without help of any deadline, and hears of the
// loss in each of them once; whoever waits for the members of an epoch finds all of them doing the
// same there: agreeing on calls, or meeting a new process.
//
// The rank that is lost is dead at the beginning, and all watchers have seen it. The change of members
// is one step (roll.pml has its steps), and so is what members of an epoch say to each other.
//
// Mutations, each of which makes the check fail:
//   NO_ANSWER        nobody answers for a rank
//   ANSWERS_HERE     a watcher answers also for a host that waits in this exchange for its turn
//   ANSWERS_LATE     a watcher does not look again, when it has its turn, whether the host is elsewhere
//   ANSWERS_TWICE    it does not look whether the host has come meanwhile
//   NO_TURNS         a host does not wait for a watcher that is answering
//   FORGETS          a host does not take what a watcher has agreed on
//   WAITS_UNSEEN     no watcher answers for a host that waits in a call
#ifndef N
#define N 2  // ranks that are left
#endif
#define X 2  // exchanges
#define AT(x, r) ((x) * N + (r))
#define NOWHERE X

#define AGREES 1
#define MEETS 2

byte epoch[X];           // of the members: 0 with the lost rank, 1 without it, 2 with a new process
byte known[X * N];       // the last that a rank has adopted
byte said[X * N * 3];    // by exchange, rank and epoch
byte newcomer_said[X];   // in epoch 2
byte assembled[X];       // a bit for each rank that has come to take a new process in
bool is_locked[X * N];   // LossWatch::mutex_
bool is_answered[X * N]; // what the host has still to hear
byte heard[X * N];       // how often the host has
byte waits_in[N];        // where the host of a rank waits
byte calls;              // of exchange 0 after the loss
byte done;
bool takes_in;           // a new process comes

#define SAID(x, r, e) said[(AT(x, r)) * 3 + (e)]
#define EVERYONE ((1 << N) - 1)
#if N == 2
#define ALL_SAID(x, e) (SAID(x, 0, e) && SAID(x, 1, e))
#define SAME(x, e) (SAID(x, 0, e) == SAID(x, 1, e))
#else
#define ALL_SAID(x, e) (SAID(x, 0, e) && SAID(x, 1, e) && SAID(x, 2, e))
#define SAME(x, e) (SAID(x, 0, e) == SAID(x, 1, e) && SAID(x, 1, e) == SAID(x, 2, e))
#endif

inline lock(x, r) {
  atomic { !is_locked[AT(x, r)] -> is_locked[AT(x, r)] = true }
}
inline unlock(x, r) {
  is_locked[AT(x, r)] = false
}

// Members of the epoch that is there: what each says, and then all have heard it.
inline say(x, r, what) {
  atomic {
    known[AT(x, r)] = epoch[x];
    SAID(x, r, epoch[x]) = what
  }
  ALL_SAID(x, known[AT(x, r)]);
  assert(SAME(x, known[AT(x, r)]))
}

// LossWatch::settle: whoever comes first changes the members.
inline settle(x, r) {
  waits_in[r] = x;
#ifndef NO_TURNS
  lock(x, r);
#endif
  if
#ifndef FORGETS
  :: is_answered[AT(x, r)] -> is_answered[AT(x, r)] = false
  :: !is_answered[AT(x, r)] ->
#else
  :: true ->
#endif
    atomic {
      if
      :: epoch[x] == 0 -> epoch[x] = 1
      :: else
      fi
    }
    say(x, r, AGREES)
  fi;
  heard[AT(x, r)]++;
#ifndef NO_TURNS
  unlock(x, r);
#endif
  waits_in[r] = NOWHERE
}

// A call of exchange 0, for which the host waits, once that has been settled here. Who has settled the
// other one first does that as well before it makes a call.
inline call_again(r) {
#ifndef WAITS_UNSEEN
  waits_in[r] = 0;
#endif
  calls++;
  calls == N;
  waits_in[r] = NOWHERE
}

// LossWatch::assemble, and then readmit: when all have come, whoever is first takes the new process
// in.
inline take_in(x, r) {
  waits_in[r] = x;
  lock(x, r);
  assembled[x] = assembled[x] | (1 << r);
  assembled[x] == EVERYONE;
  unlock(x, r);
  waits_in[r] = NOWHERE;
  waits_in[r] = x;
  lock(x, r);
  atomic {
    if
    :: epoch[x] == 1 -> epoch[x] = 2
    :: else
    fi
  }
  say(x, r, MEETS);
  newcomer_said[x];
  unlock(x, r);
  waits_in[r] = NOWHERE
}

proctype host(byte r) {
  byte first, second;
  if
  :: first = 0
  :: first = 1
  fi;
  second = 1 - first;
  settle(first, r);
  if
  :: first == 0 -> call_again(r)
  :: else
  fi;
  settle(second, r);
  if
  :: first == 1 -> call_again(r)
  :: else
  fi;
  if
  :: takes_in -> take_in(0, r); take_in(1, r)
  :: else
  fi;
  assert(heard[AT(0, r)] == 1 && heard[AT(1, r)] == 1);
  assert(!is_answered[AT(0, r)] && !is_answered[AT(1, r)]);
  done++
}

#ifdef ANSWERS_HERE
#define IS_ELSEWHERE(x, r) (waits_in[r] != NOWHERE)
#else
#define IS_ELSEWHERE(x, r) (waits_in[r] != NOWHERE && waits_in[r] != x)
#endif

#ifdef ANSWERS_LATE
#define IS_STILL_ELSEWHERE(x, r) true
#else
#define IS_STILL_ELSEWHERE(x, r) IS_ELSEWHERE(x, r)
#endif
#ifdef ANSWERS_TWICE
#define HAS_MOVED(x, r) true
#else
#define HAS_MOVED(x, r) (epoch[x] > known[AT(x, r)])
#endif

// LossWatch::answer. It looks every few milliseconds; here where it may find something.
proctype watcher(byte x; byte r) {
  do
  :: epoch[x] > known[AT(x, r)] && IS_ELSEWHERE(x, r) ->
#ifdef NO_ANSWER
    done == N
#else
    lock(x, r);
    if
    :: HAS_MOVED(x, r) && IS_STILL_ELSEWHERE(x, r) ->
      say(x, r, AGREES);
      is_answered[AT(x, r)] = true
    :: else
    fi;
    unlock(x, r)
#endif
  :: done == N -> break
  od
}

proctype newcomer(byte x) {
  atomic { epoch[x] == 2 -> newcomer_said[x] = MEETS }
}

init {
  byte i;
  atomic {
    if
    :: takes_in = true
    :: takes_in = false
    fi;
    i = 0;
    do
    :: i < N ->
      waits_in[i] = NOWHERE;
      run host(i);
      run watcher(0, i);
      run watcher(1, i);
      i++
    :: else -> break
    od;
    if
    :: takes_in -> run newcomer(0); run newcomer(1)
    :: else
    fi
  }
}
