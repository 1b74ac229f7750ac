// SPDX-License-Identifier: Apache-2.0
// How ranks on GPUs go on without those that are lost (src/cuda/exchange/loss_watch.hpp, losses.cpp).
// Each rank has a host that queues calls or replays captured ones, a GPU that makes one after the
// other, and a watcher that stops the GPU when a member is lost.
//
// Checked: calls that are not void after a recovery are the same on all ranks that are left, with the
// same members; a rank whose calls have ended, and whose host hears of nothing, has the results of
// all; a call takes no word of a lost rank, of another call or of another membership for one of its
// own, and nobody who was given up ends a call well by a word of those that go on; every rank that is
// left gets through its calls, without help of any deadline.
//
// The ranks are alike, so rank 0 is the one that dies at any moment, also when its word has reached
// one rank alone, or is given up and lives on. In the first case rank 1 may die after it; by day only
// while some are in a recovery, and the ranks make one call then. Of a rank 0 that was given up there
// is the GPU alone, which is stopped at any later moment. The host of the last rank looks for news
// only when its calls have ended, those of others at any time.
//
// The change of members is one step (roll.pml has its steps), as is the end of a recovery: whoever is
// in it posts the numbers of its calls, and then it is over for all members or for none. Left out:
// what a call moves behind its words, plans, refusals with a cause of their own (a host that hears of
// a refusal waits for the news), interrupts, numbers that wrap.
//
// Mutations, each of which makes the check fail:
//   STOPS_FIRST            the watcher stops the GPU before it says that there are news
//   NO_LOCK                a recovery does not wait until the watcher has stopped the GPU
//   GOES_ON_EARLY          a recovery does not wait until all that was queued has ended, replays too
//   FAULT_IS_NOT_VOID      a call that a peer has refused counts as good in a recovery
//   OWN_FIRST_VOID         a rank takes its own first void call for that of all
//   OWN_LAST               a rank counts on from its own last call instead of that of all
//   RETURNS_ALONE          a recovery is over for whoever has the numbers of all, others or not
//   LOOKS_ONCE             who is in a recovery does not look for further deaths
//   SETTLES_WITHOUT_NEWS   a recovery that began without news lets the watcher look before its end
//   RESUMES_FIRST          news are taken back before the GPU may go on
//   TELLS_LOST             lost ranks get words
//   AWAITS_LOST            words of lost ranks are awaited
//   HEEDS_LOST             words of lost ranks are heeded
#ifndef N
#define N 3  // ranks
#endif
#ifndef C
#define C 2  // calls
#endif
#ifndef QUEUE
#define QUEUE 2  // calls of a host that have not ended, at most
#endif
#ifndef DEATHS
#define DEATHS 2
#endif

#define EVERY_RANK ((1 << N) - 1)
#define BIT(m) (1 << (m))
#if N == 3
#define ALL_OF(what) (what(0) && what(1) && what(2))
#define SET_OF(what) (what(0) + 2 * what(1) + 4 * what(2))
#else
#define ALL_OF(what) (what(0) && what(1) && what(2) && what(3))
#define SET_OF(what) (what(0) + 2 * what(1) + 4 * what(2) + 8 * what(3))
#endif

// --- what happens ---

byte calls;   // that every rank makes
byte deaths;  // that may still come
bool is_dead[N];
bool is_masked;  // rank 0 was given up

#define IS_DEAD(m) is_dead[m]
#define DEAD SET_OF(IS_DEAD)

// --- the agreement ---

byte epoch;  // how often the members have changed
byte members_of[DEATHS + 2];
byte settled;    // the last epoch whose recovery is over
byte posted[N];  // the last epoch for which a rank has posted the numbers of its calls
byte last_of[N], first_void_of[N];
byte last, first_void;  // of all members

// --- a rank ---

#define RUNNING 0
#define GIVEN_UP 1
#define BROKEN 2
// In the memory of the GPU:
byte ended[N];  // the number of the last call that has ended
byte stopped[N];
byte broken_in[N];  // the number of the call in which it became BROKEN
byte fault[N];      // that of the fault record; 0: none
byte members[N];    // without the lost ones
// In the memory of the host:
byte n[N];       // calls that were made and are not void
byte queued[N];  // of them, those that have not ended
byte known[N];   // the epoch whose members it has taken on
bool has_news[N];
bool is_locked[N];  // LossWatch::mutex_

byte with[N * (C + 1)];  // by rank and call: the members with which it has ended well, or 0
#define WITH(m, call) with[(m) * (C + 1) + (call)]

// Words lie in two places by the parity of the number, by owner and writer. One says the call, which
// is the same on all ranks, whether it is refused, and who the members are.
#define CELL(e, owner, writer) (((e) % 2) * N * N + (owner) * N + (writer))
#define SAY(call, members) ((call) + 16 * (members))
#define REFUSED 8
byte number[2 * N * N];
byte said[2 * N * N];

#define IS_MEMBER(m) (members[me] & BIT(m))
#ifdef TELLS_LOST
#define IS_TOLD(m) true
#else
#define IS_TOLD(m) IS_MEMBER(m)
#endif
#ifdef AWAITS_LOST
#define IS_AWAITED(m) true
#else
#define IS_AWAITED(m) IS_MEMBER(m)
#endif
#ifdef HEEDS_LOST
#define IS_HEEDED(m) (IS_MEMBER(m) || number[CELL(e, me, m)] >= e)
#else
#define IS_HEEDED(m) IS_MEMBER(m)
#endif
// What nobody will look at is not written.
#ifdef HEEDS_LOST
#define IS_READ(m) true
#else
#define IS_READ(m) ((members[m] & BIT(me)) && (m > 0 || stopped[0] != BROKEN))
#endif
#define HAS_WORD(m) ((m) == me || !IS_AWAITED(m) || number[CELL(e, me, m)] >= e)

#define POST(peer)                                                  \
  if                                                                \
  :: !is_silent && peer != me && IS_TOLD(peer) && IS_READ(peer) ->  \
     number[CELL(e, peer, me)] = e;                                 \
     said[CELL(e, peer, me)] = SAY(call, members[me]) + (is_good -> 0 : REFUSED) \
  :: else                                                           \
  fi
// Rank 0 has no host here.
#define HAS_NEXT (queued[me] > 0 || (me == 0 && n[0] < calls))
#define BEGIN_CALL                    \
  if                                  \
  :: me == 0 -> n[0]++; queued[0] = 1 \
  :: else                             \
  fi;                                 \
  e = ended[me] + 1;                  \
  call = n[me] - queued[me] + 1;      \
  is_good = stopped[me] == RUNNING;   \
  is_silent = stopped[me] == BROKEN && e - broken_in[me] > 1
#define POST_ALL                 \
  for (peer : 0 .. N - 1) {      \
    POST(peer)                   \
  };                             \
  peer = 0;                      \
  is_silent = false
#define END_CALL             \
  ended[me] = e;             \
  queued[me]--;              \
  is_good = false;           \
  e = 0;                     \
  call = 0;                  \
  peer = 0

// Nobody reads what others have written to this rank any more.
inline forget_words(m, i) {
  for (i : 0 .. N - 1) {
    number[CELL(0, m, i)] = 0;
    number[CELL(1, m, i)] = 0;
    said[CELL(0, m, i)] = 0;
    said[CELL(1, m, i)] = 0
  }
}

// What this rank has written to others and has posted stays.
inline die(m, i) {
  is_dead[m] = true;
  ended[m] = 0;
  stopped[m] = 0;
  broken_in[m] = 0;
  fault[m] = 0;
  members[m] = 0;
  n[m] = 0;
  queued[m] = 0;
  known[m] = 0;
  has_news[m] = false;
  is_locked[m] = false;
  for (i : 0 .. C) {
    WITH(m, i) = 0
  };
  forget_words(m, i);
  i = 0
}

proctype gpu(byte me) {
  byte e;  // the number of the call
  byte call;
  byte peer;
  bool is_good, is_silent;
  {
end_of_queue:
    do
    :: atomic {  // and dies between its words
         me == 0 && !is_masked && HAS_NEXT ->
         deaths--;
         BEGIN_CALL;
         if
         :: peer = 1
         :: peer = 2
         fi;
         POST(peer);
         is_silent = false;
         die(0, peer)
       }
    :: d_step {
         HAS_NEXT ->
         BEGIN_CALL;
         POST_ALL
       };
       if
       :: d_step {  // no wait goes on
            stopped[me] == BROKEN || (me == 0 && is_masked) ->
            if
            :: stopped[me] != BROKEN ->
               broken_in[me] = e;
               stopped[me] = BROKEN;
               forget_words(0, peer)
            :: else
            fi;
            WITH(me, call) = 0;
            END_CALL
          }
       :: d_step {
            stopped[me] != BROKEN && ALL_OF(HAS_WORD) ->
            for (peer : 0 .. N - 1) {
              if
              :: peer != me && IS_HEEDED(peer) ->
                 assert(said[CELL(e, me, peer)] / 16 == members[me]);
                 if
                 :: said[CELL(e, me, peer)] & REFUSED ->
                    is_good = false;
                    if
                    :: stopped[me] == RUNNING -> stopped[me] = GIVEN_UP; fault[me] = e
                    :: else
                    fi
                 :: else ->
                    assert(number[CELL(e, me, peer)] == e);
                    assert(said[CELL(e, me, peer)] == SAY(call, members[me]))
                 fi;
                 if  // a refusal may be that of the next call but one, too
                 :: number[CELL(e, me, peer)] == e -> said[CELL(e, me, peer)] = 0
                 :: else
                 fi
              :: else
              fi
            };
            WITH(me, call) = (is_good && me > 0 -> members[me] : 0);
            END_CALL
          }
       fi
    od
  } unless { is_dead[me] };
  d_step {
    e = 0;
    call = 0;
    peer = 0;
    is_good = false;
    is_silent = false
  }
}

#define IS_IN_TROUBLE (epoch != known[me] || (members_of[known[me]] & DEAD))

proctype watcher(byte me) {
  byte e;
  bool is_stopped;
  {
end_of_trouble:
    do
    :: d_step {
         !is_locked[me] && !has_news[me] && IS_IN_TROUBLE ->
         is_locked[me] = true;
#ifndef STOPS_FIRST
         has_news[me] = true;
#endif
         e = ended[me];
         is_stopped = stopped[me] == BROKEN
       };
       d_step {
         if
         :: !is_stopped -> broken_in[me] = e + 1; stopped[me] = BROKEN
         :: else
         fi;
         e = 0;
         is_stopped = false
#ifdef STOPS_FIRST
       };
       d_step {
         has_news[me] = true;
#else
         ;
#endif
         is_locked[me] = false
       }
    od
  } unless { is_dead[me] };
  d_step {
    e = 0;
    is_stopped = false
  }
}

// Of a call that its host takes for good.
#define IS_CUT_SHORT(call) (n[me] >= (call) && WITH(me, call) == 0)
#if C == 1
#define IS_ANY_CUT_SHORT IS_CUT_SHORT(1)
#elif C == 2
#define IS_ANY_CUT_SHORT (IS_CUT_SHORT(1) || IS_CUT_SHORT(2))
#else
#define IS_ANY_CUT_SHORT (IS_CUT_SHORT(1) || IS_CUT_SHORT(2) || IS_CUT_SHORT(3))
#endif

#define HAS_POSTED(m) (!(members_of[known[me]] & BIT(m)) || posted[m] == known[me])
#define IS_MISSING(m) ((members_of[known[me]] & BIT(m)) && is_dead[m] && posted[m] != known[me])
#define IS_ANY_MISSING (SET_OF(IS_MISSING) != 0)

#define FOR_MEMBERS(m, body)                  \
  for (m : 0 .. N - 1) {                      \
    if                                        \
    :: members_of[known[me]] & BIT(m) -> body \
    :: else                                   \
    fi                                        \
  };                                          \
  m = 0
#define TAKE_NUMBERS                                                       \
  last = 0;                                                                \
  first_void = 255;                                                        \
  FOR_MEMBERS(m,                                                           \
    last = (last_of[m] > last -> last_of[m] : last);                       \
    first_void = (first_void_of[m] < first_void -> first_void_of[m] : first_void))

#ifdef GOES_ON_EARLY
#define MAY_SETTLE (!is_locked[me])
#elif defined(NO_LOCK)
#define MAY_SETTLE (queued[me] == 0)
#else
#define MAY_SETTLE (queued[me] == 0 && !is_locked[me])
#endif
#ifdef OWN_LAST
#define LAST own_last
#else
#define LAST last
#endif
#ifdef OWN_FIRST_VOID
#define FIRST_VOID own_first_void
#else
#define FIRST_VOID first_void
#endif
#define END_SETTLING           \
  all_last = LAST;             \
  all_first_void = FIRST_VOID; \
  is_locked[me] = false

// A word to this rank that none of its calls will wait for.
#define IS_OLD(cell)      \
  ((cell) / N % N == me && \
   (number[cell] <= all_last || !(members_of[known[me]] & BIT((cell) % N))))

proctype host(byte me) {
  byte own_last, own_first_void;
  byte all_last, all_first_void;
  byte m;
  byte call;
  {
end_of_calls:
    do
    :: d_step { n[me] < calls && queued[me] < QUEUE -> n[me]++; queued[me]++ }
    :: d_step {  // check() finds nothing
         queued[me] == 0 && !has_news[me] && fault[me] == 0 && IS_ANY_CUT_SHORT -> assert(false)
       }
    :: d_step {  // there are news, or the host itself finds a rank that has left or is late
         (me != N - 1 || queued[me] == 0) && (has_news[me] || (members_of[known[me]] & DEAD)) ->
         if
         :: stopped[me] != BROKEN -> broken_in[me] = ended[me] + 1; stopped[me] = BROKEN
         :: else
         fi
       };
       d_step {
         MAY_SETTLE ->
         own_last = ended[me];
         own_first_void = own_last + 1;
         if
         :: broken_in[me] <= own_last -> own_first_void = broken_in[me]
         :: else
         fi;
         if
#ifndef FAULT_IS_NOT_VOID
         :: fault[me] != 0 && fault[me] < own_first_void -> own_first_void = fault[me]
#endif
         :: else
         fi;
#ifndef SETTLES_WITHOUT_NEWS
         has_news[me] = true;
#endif
         is_locked[me] = true
       };
settle:
       atomic {
         if
         :: epoch == known[me] ->
            members_of[epoch + 1] = members_of[epoch] & ~DEAD;
            assert(members_of[epoch + 1] != members_of[epoch]);
            epoch++
         :: else
         fi;
         known[me] = epoch;
         posted[me] = epoch;
         last_of[me] = own_last;
         first_void_of[me] = own_first_void
       };
       do
#ifdef RETURNS_ALONE
       :: d_step {
            ALL_OF(HAS_POSTED) ->
            TAKE_NUMBERS;
            END_SETTLING
          };
          break
       :: !ALL_OF(HAS_POSTED) && epoch != known[me] -> goto settle
#else
       :: d_step {
            epoch == known[me] && settled < epoch && ALL_OF(HAS_POSTED) ->
            TAKE_NUMBERS;
            for (m : 0 .. N - 1) {
              last_of[m] = 0;
              first_void_of[m] = 0
            };
            m = 0;
            settled = epoch
          }
       :: atomic { settled >= known[me] -> END_SETTLING; break }
       :: epoch != known[me] && settled < known[me] -> goto settle
#endif
#ifndef LOOKS_ONCE
       :: epoch == known[me] && IS_ANY_MISSING -> goto settle
#endif
       od;
       skip;  // no step that a loop ends in is a d_step
#ifdef RESUMES_FIRST
       has_news[me] = false;
#endif
       // The watcher does nothing meanwhile, so that this is one step.
       d_step {
         assert(own_last + 1 >= all_first_void);
         assert(n[me] >= own_last + 1 - all_first_void);
         n[me] = n[me] - (own_last + 1 - all_first_void);
         for (call : n[me] + 1 .. C) {
           WITH(me, call) = 0
         };
         assert(!IS_ANY_CUT_SHORT);
         FOR_MEMBERS(m,
           if
           :: !is_dead[m] && known[m] == known[me] ->
              for (call : 1 .. n[me]) {
                assert(n[m] >= call && WITH(m, call) == WITH(me, call))
              }
           :: else
           fi);
         call = 0;
         for (m : 0 .. 2 * N * N - 1) {
           if
           :: IS_OLD(m) -> number[m] = 0; said[m] = 0
           :: else
           fi
         };
         m = 0;
         ended[me] = all_last + 1;
         members[me] = members_of[known[me]];
         fault[me] = 0;
         broken_in[me] = 0;
         stopped[me] = RUNNING;
         own_last = 0;
         own_first_void = 0;
         all_last = 0;
         all_first_void = 0;
#ifdef SETTLES_WITHOUT_NEWS
       };
       d_step {
#endif
#ifndef RESUMES_FIRST
         has_news[me] = false
#endif
       }
    od
  } unless { is_dead[me] };
  d_step {
    own_last = 0;
    own_first_void = 0;
    all_last = 0;
    all_first_void = 0;
    m = 0;
    call = 0
  }
}

#ifdef NIGHT
#define MAY_DIE true
#else
#define HAS_BEGUN(m) (posted[m] > 0)
#define IS_BACK(m) (members[m] != EVERY_RANK)
#define MAY_DIE (SET_OF(HAS_BEGUN) != 0 && (SET_OF(IS_BACK) | 1) != EVERY_RANK)
#endif

proctype fate() {
  byte i;
  if
  :: d_step { !is_dead[0] -> deaths--; die(0, i) }
  :: d_step {
       !is_dead[0] ->
       deaths = 0;
       members_of[1] = EVERY_RANK & ~BIT(0);
       epoch = 1;
       is_masked = true
     }
  :: is_dead[0]
  fi;
end_of_fate:
  if
  :: d_step { deaths > 0 && MAY_DIE -> deaths = 0; die(1, i) }
  :: deaths == 0
  fi
}

init {
  atomic {
    byte i;
    members_of[0] = EVERY_RANK;
#ifdef NIGHT
    calls = C;
    deaths = DEATHS;
#else
    if
    :: calls = 1; deaths = DEATHS
    :: calls = C; deaths = 1
    fi;
#endif
    for (i : 0 .. N - 1) {
      members[i] = EVERY_RANK;
      run gpu(i);
      if
      :: i > 0 -> run host(i); run watcher(i)
      :: else
      fi
    };
    i = 0;
    run fate()
  }
}
