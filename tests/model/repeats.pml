// SPDX-License-Identifier: Apache-2.0
// Calls on GPUs that are made again among the ranks that are left (PeerLoss::kRepeat;
// src/cuda/exchange/gate.cu, repeats.hpp and losses.cpp). Behind each call comes a gate, which waits
// until all ranks have all of the call, and holds what is behind it once kernels are stopped. The
// watches of those that are left agree, and make again what a gate holds.
//
// Checked: every rank gets through all calls; a call has the same members on all that are left; each
// takes from the others what they have sent in the same call; a call that is over, so that others
// have read it, is not made again.
//
// One rank dies between any two of its steps, once. What watches say to each other is one step, and
// their members are agreed on (losses.pml, roll.pml). A gate is behind each call, and every call can
// be made again.
//
// Mutations, each of which makes the check fail:
//   NO_GATE      a rank goes on when it has all of a call, whoever else has not
//   NO_HOLD      a gate lets through what is behind a call that was cut short
//   NO_LOCK      a call begins while the watch speaks for a rank without one
//   OWN_WHOLE    a rank that has all of a call does not make it again
//   OPENS_FIRST  the gate opens before all have what was made again
#ifndef CALLS
#define CALLS 2
#endif
#define N 2      // ranks that are left
#define M 3      // and the one that dies
#define DEAD N
#define AT(to, from) ((to) * M + (from))
#define SLOT(to, from, e) (AT(to, from) * 2 + ((e) & 1))
#define IN(r, c) ((r) * (CALLS + 1) + (c))

byte sent_in[2 * M * M];  // the epoch in which that came, two calls in turn
byte sent_call[2 * M * M];  // of the program
byte said_whole[M * M];
byte epoch[M];   // of the last call that has ended
byte passed[N], whole[N];
byte running[N]; // the call of the program that is queued, 0: none
bool has_all[M]; // of the last call
bool is_held[N], is_stopped[N], knows[N], is_locked[N], has_spoken[N];
byte last_of[N], whole_of[N];  // what they say
byte members[N * (CALLS + 1)];  // of a call that is over: 1 with the dead rank, 2 without it
bool is_dead;
byte num_done;

#define IS_LOST(r, p) ((r) < N && (p) == DEAD && knows[r])
#define IS_STOPPED(r) ((r) < N && is_stopped[r])

#define NEXT(r) (((r) + 1) % M)
#define AFTER(r) (((r) + 2) % M)
#define HAS(r, p, e) (IS_LOST(r, p) || sent_in[SLOT(r, p, e)] >= (e))
#define IS_OF(r, p, e, c) (IS_LOST(r, p) || sent_call[SLOT(r, p, e)] == (c))
#define IS_WHOLE(r, p, e) (IS_LOST(r, p) || said_whole[AT(r, p)] >= (e))

inline send(r, p, e, c) {
  atomic {
    if
    :: !IS_LOST(r, p) && !IS_STOPPED(r) ->
      sent_in[SLOT(p, r, e)] = e;
      sent_call[SLOT(p, r, e)] = c
    :: else
    fi
  }
}

// The kernel of a call of the rank, and whether it was cut short.
inline move_rows(r, c, e, is_cut) {
  e = epoch[r] + 1;
  send(r, NEXT(r), e, c);
  send(r, AFTER(r), e, c);
  atomic {
    if
    :: HAS(r, NEXT(r), e) && HAS(r, AFTER(r), e) ->
      assert(IS_OF(r, NEXT(r), e, c) && IS_OF(r, AFTER(r), e, c));
      is_cut = false
    :: IS_STOPPED(r) -> is_cut = true
    fi;
    has_all[r] = !is_cut;
    epoch[r] = e
  }
}

// The gate behind it, up to where it opens or the rank is stopped.
inline meet(r, e, is_cut) {
  is_cut = is_cut || IS_STOPPED(r);
  if
  :: !is_cut ->
    if
    :: r < N -> whole[r] = e
    :: else
    fi;
    said_whole[AT(NEXT(r), r)] = e;
    said_whole[AT(AFTER(r), r)] = e;
#ifndef NO_GATE
    if
    :: IS_WHOLE(r, NEXT(r), e) && IS_WHOLE(r, AFTER(r), e)
    :: IS_STOPPED(r) -> is_cut = true
    fi
#endif
  :: else
  fi
}

inline end(r, c) {
  atomic {
    assert(members[IN(r, c)] == 0);
    members[IN(r, c)] = (knows[r] -> 2 : 1)
  }
}

proctype rank(byte r) {
  byte c = 1, e;
  bool is_cut;
  do
  :: c <= CALLS ->
#ifdef NO_LOCK
    running[r] = c;
#else
    atomic { !is_locked[r] -> running[r] = c }
#endif
    move_rows(r, c, e, is_cut);
    meet(r, e, is_cut);
    if
    :: !is_cut -> atomic { passed[r] = e; running[r] = 0; end(r, c) }
    :: else ->
#ifdef NO_HOLD
       running[r] = 0;
       end(r, c)
#else
       is_held[r] = true;
       !is_held[r]
#endif
    fi;
    c++
  :: else -> break
  od;
  num_done++
}

proctype dying() {
  byte c = 1, e;
  bool is_cut;
  {
    do
    :: c <= CALLS ->
      move_rows(DEAD, c, e, is_cut);
      meet(DEAD, e, is_cut);
      c++
    :: else -> break
    od
  } unless { is_dead };
  is_dead
}

proctype death() {
  is_dead = true
}

#define MOST(a) (a[0] > a[1] -> a[0] : a[1])
#define LEAST(a) (a[0] < a[1] -> a[0] : a[1])
#ifdef OWN_WHOLE
#define WHOLE(r) whole_of[r]
#else
#define WHOLE(r) LEAST(whole_of)
#endif

proctype watch(byte r) {
  byte e, c;
  bool is_cut, is_again;
  is_dead;
  is_stopped[r] = true;
  atomic { is_locked[r] = true };
  is_held[r] || running[r] == 0;
  atomic {
    last_of[r] = epoch[r];
    whole_of[r] = whole[r];
    has_spoken[r] = true
  }
  has_spoken[0] && has_spoken[1];
  atomic {
    is_again = is_held[r] && WHOLE(r) < passed[r] + 1;
    c = running[r];
    epoch[r] = MOST(last_of) + 1;
    passed[r] = epoch[r];
    whole[r] = epoch[r];
    knows[r] = true;
    is_stopped[r] = false
  }
  if
  :: is_again ->
#ifdef OPENS_FIRST
     atomic { running[r] = 0; end(r, c); is_held[r] = false };
#endif
     move_rows(r, c, e, is_cut);
     meet(r, e, is_cut);
     passed[r] = e;
     atomic { running[r] = 0; end(r, c); is_held[r] = false }
  :: !is_again && is_held[r] ->
     atomic {
       assert(has_all[r]);
       knows[r] = false;  // it was over before that
       end(r, c);
       knows[r] = true;
       running[r] = 0;
       is_held[r] = false
     }
  :: else
  fi;
  is_locked[r] = false
}

init {
  byte c;
  atomic {
    run rank(0);
    run rank(1);
    run dying();
    run death();
    run watch(0);
    run watch(1)
  }
  num_done == N;
  c = 1;
  do
  :: c <= CALLS ->
    assert(members[IN(0, c)] != 0 && members[IN(0, c)] == members[IN(1, c)]);
    c++
  :: else -> break
  od
}
