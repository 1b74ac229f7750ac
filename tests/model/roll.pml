// SPDX-License-Identifier: Apache-2.0
// The agreement by which the ranks of one host go on after some of them have died
// (src/survive/shared_roll.hpp): a call returns for all with the same members, or is made again by those
// that are left.
//
// Checked: whoever returns from a call does so in the same epoch, as a member of it, with what it needs
// from all its members; nobody takes other ranks for the members of an epoch than its proposer has
// left; once a rank has passed the barrier of an epoch, no member of it is inside an attempt of an
// older one; every rank that is neither dead nor evicted ends all its calls.
//
// The roll is in shared memory and outlives who wrote it. Its accesses are atomic and all seq_cst; the
// state is one word, changed by compare-and-swap alone. A set of members is one word here; one of
// several is written and read between the same two looks at the state. A rank looks at all lines in one
// step: a line that says an attempt says so until the attempt's epoch or call is over, and then the
// compare-and-swap fails. The ranks are alike, so rank 0 is the first that dies, then rank 1. That a
// rank arrives and dies between a look at its line and one at its life is as if it were suspected
// before. A rank that has ended looks like a dead one. Left out: rounds of the barrier, of which
// an epoch has one, and what is exchanged in an attempt (cpu.pml); each epoch has memory of its own.
//
// Mutations, each of which makes the check fail:
//   RETURNS_ON_SIGHT       who sees that all have arrived returns, whatever its compare-and-swap says
//   COMMITS_ANY_EPOCH      the commit's compare-and-swap does not compare the epoch
//   PROPOSES_ANY_CALL      the proposal's does not compare the committed call
//   SWAPS_FIRST            the members are stored after the proposal's compare-and-swap
//   ONE_SLOT               a rank has one place for the members that it proposes instead of two
//   READS_ONCE             a reader of members does not look at the epoch again
//   DEAD_DO_NOT_COUNT      a dead rank that has arrived does not count as arrived
//   ARRIVES_IN_NO_EPOCH    an arrival says the call alone
//   NO_BARRIER             a call is made again without the barrier
//   NO_LOOK_BACK           who sees a newer epoch does not look whether its call was committed before
//   RETURNS_EVICTED        who sees a newer epoch and its call committed returns, though it is no member
#ifndef N
#define N 3  // ranks
#endif
#ifndef C
#define C 2  // calls
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef SUSPICIONS
#define SUSPICIONS 1  // of ranks that are alive; without NIGHT only where nobody dies
#endif

#define EVERY_RANK ((1 << N) - 1)
#define BIT(m) (1 << (m))
#if N == 3
#define ALL_OF(what) (what(0) && what(1) && what(2))
#define SET_OF(what) (what(0) + 2 * what(1) + 4 * what(2))
#define EACH(what) what(0) what(1) what(2)
#else
#define ALL_OF(what) (what(0) && what(1) && what(2) && what(3))
#define SET_OF(what) (what(0) + 2 * what(1) + 4 * what(2) + 8 * what(3))
#define EACH(what) what(0) what(1) what(2) what(3)
#endif

// --- the roll ---

byte epoch, proposer, committed;  // the state
byte arrived[N];                  // the attempt for which a rank has what it needs
byte proposal[2 * N];             // members
byte at_barrier[N];               // epoch
byte given[N * N];                // by giver and taker: the attempt

#define ATTEMPT (e * (C + 1) + n)
#ifdef ARRIVES_IN_NO_EPOCH
#define ARRIVAL n
#else
#define ARRIVAL ATTEMPT
#endif
#ifdef ONE_SLOT
#define SLOT(rank, of_epoch) proposal[2 * (rank)]
#else
#define SLOT(rank, of_epoch) proposal[2 * (rank) + (of_epoch) % 2]
#endif

// --- what happens, and what is checked ---

bool is_gone[N];          // dead, evicted, or through with its calls
byte deaths, suspicions;  // that may still come
bool is_inside[N];        // an attempt
byte passed[N];           // the last epoch whose barrier a rank has passed
byte members_of[N];       // by epoch
byte decided[C + 1] = 255;  // by call: the epoch in which it was committed or has returned

#define IS_GONE(m) is_gone[m]
#define DECIDE                                          \
  assert(decided[n] == 255 || decided[n] == e);         \
  decided[n] = e
#define NOT_BEHIND(m, other) \
  assert(!is_inside[m] || passed[m] >= passed[other] || !(members_of[passed[other]] & BIT(m)))
#define MAY_ENTER(m) NOT_BEHIND(me, m);
#define MAY_PASS(m) NOT_BEHIND(m, me);

// --- a rank ---

#define HAS_GIVEN(m) (!(members & BIT(m)) || (m) == me || given[(m) * N + me] == ATTEMPT)
#define HAS_ARRIVED(m) (!(members & BIT(m)) || arrived[m] == ARRIVAL)
#define IS_AT_BARRIER(m) (!(members & BIT(m)) || at_barrier[m] == e)
#ifdef DEAD_DO_NOT_COUNT
#define COUNTS(m) (HAS_ARRIVED(m) && !IS_GONE(m))
#else
#define COUNTS(m) HAS_ARRIVED(m)
#endif

#define GIVE(m)                                                       \
  if                                                                  \
  :: (members & BIT(m)) && (m) != me -> given[me * N + (m)] = ATTEMPT \
  :: else                                                             \
  fi;
// A rank that waits for has(m) proposes members without m, and without others that it sees dead, or not.
#define LOOK(has, m)                                                         \
  :: atomic {                                                                \
       !has(m) && IS_GONE(m) ->                                              \
       if                                                                    \
       :: set = members & ~BIT(m)                                            \
       :: set = members & ~SET_OF(IS_GONE)                                   \
       fi                                                                    \
     };                                                                      \
     goto propose                                                            \
  :: d_step {                                                                \
       !has(m) && !IS_GONE(m) && (m) != me && suspicions > 0 ->              \
       suspicions--;                                                         \
       set = members & ~BIT(m)                                               \
     };                                                                      \
     goto propose
#define LOOK_GIVEN(m) LOOK(HAS_GIVEN, m)
#define LOOK_ARRIVED(m) LOOK(HAS_ARRIVED, m)
#define LOOK_BARRIER(m) LOOK(IS_AT_BARRIER, m)

#ifdef COMMITS_ANY_EPOCH
#define IS_TO_COMMIT (committed == n - 1)
#else
#define IS_TO_COMMIT (epoch == e && committed == n - 1)
#endif
#ifdef PROPOSES_ANY_CALL
#define IS_TO_REPLACE (epoch == e)
#else
#define IS_TO_REPLACE (epoch == e && committed == n - 1)
#endif
#define RETURN                                     \
  DECIDE;                                          \
  assert(members & BIT(me));                       \
  assert(members == members_of[e]);                \
  assert(has_all == ATTEMPT);                      \
  is_inside[me] = false

proctype rank(byte me) {
  byte n;  // the call
  byte e;  // the epoch that the rank works in, and its members
  byte members = EVERY_RANK;
  byte has_all;  // that it needs: the attempt
  byte next;
  byte from;
  byte set;
  bool is_committed;
  {
    skip;
call:
    if
    :: n == C -> goto end_of_calls
    :: n < C -> n++
    fi;
attempt:
    atomic {
      is_inside[me] = true;
      EACH(MAY_ENTER)
    };
    if  // that others have it later is as if they looked later, unless it dies meanwhile
    :: me < DEATHS -> EACH(GIVE)
    :: d_step { me >= DEATHS -> EACH(GIVE) }
    fi;
    do
    :: ALL_OF(HAS_GIVEN) -> break
    :: epoch != e -> goto look
    EACH(LOOK_GIVEN)
    od;
    atomic {
      arrived[me] = ARRIVAL;
      has_all = ATTEMPT
    };
    do
    :: d_step { epoch == e && committed >= n -> RETURN }; goto call
    :: epoch != e -> goto look
    :: epoch == e && committed < n && ALL_OF(COUNTS) ->
       d_step {
         if
         :: IS_TO_COMMIT -> committed = n; DECIDE
         :: else
         fi
       };
#ifdef RETURNS_ON_SIGHT
       d_step { RETURN };
       goto call
#endif
    EACH(LOOK_ARRIVED)
    od;

propose:
#ifndef SWAPS_FIRST
    SLOT(me, e + 1) = set;
#endif
    atomic {
      if
      :: IS_TO_REPLACE ->
         epoch = e + 1;
         proposer = me;
         committed = n - 1;
         members_of[epoch] = set
      :: else
      fi
    };
#ifdef SWAPS_FIRST
    SLOT(me, e + 1) = set;
#endif

look:
    atomic { set = 0; is_committed = committed >= n };
again:
    atomic { next = epoch; from = proposer };
    // The second look at the epoch, which only grows, is one step with the read before it.
    atomic {
#ifndef READS_ONCE
      if
      :: epoch != next -> goto again
      :: epoch == next
      fi;
#endif
      set = (next == 0 -> EVERY_RANK : SLOT(from, next));
      assert(set == members_of[next]);
      from = 0;
#ifdef NO_LOOK_BACK
      is_committed = is_committed && next == e;
#endif
      if
#ifdef RETURNS_EVICTED
      :: is_committed -> RETURN; next = 0; set = 0; is_committed = false; goto call
      :: !(set & BIT(me)) && !is_committed -> goto end_of_calls
#else
      :: (set & BIT(me)) && is_committed -> RETURN; next = 0; set = 0; is_committed = false; goto call
      :: !(set & BIT(me)) -> goto end_of_calls
#endif
      :: (set & BIT(me)) && !is_committed ->
         e = next;
         members = set;
         next = 0;
         set = 0
      fi
    };
#ifndef NO_BARRIER
    d_step {
      is_inside[me] = false;
      at_barrier[me] = e
    };
    do
    :: ALL_OF(IS_AT_BARRIER) -> break
    :: epoch != e -> goto look
    EACH(LOOK_BARRIER)
    od;
#endif
    atomic {
      passed[me] = e;
      EACH(MAY_PASS)
    };
    goto attempt
  } unless { is_gone[me] };
end_of_calls:
  atomic {
    is_gone[me] = true;
    is_inside[me] = false;
    n = 0;
    e = 0;
    members = 0;
    has_all = 0;
    next = 0;
    from = 0;
    set = 0;
    is_committed = false
  }
}

proctype fate() {
  byte victim;
  do
  :: d_step {
       deaths > 0 && !is_gone[victim] ->
       is_gone[victim] = true;
       is_inside[victim] = false;
       deaths--;
       victim++
     }
  :: deaths = 0 -> break
  od
}

init {
  atomic {
    byte i;
    members_of[0] = EVERY_RANK;
    if
    :: suspicions = SUSPICIONS
    :: suspicions = 0
    fi;
    deaths = DEATHS;
#ifndef NIGHT
    if
    :: suspicions > 0 -> deaths = 0
    :: else
    fi;
#endif
    for (i : 0 .. N - 1) {
      run rank(i)
    };
    i = 0;
    run fate()
  }
}
