// SPDX-License-Identifier: Apache-2.0
// Plan, dispatch and combine on GPUs where rows wait for handshakes (src/cuda/plan/plan.cu,
// swap_counts.cuh, src/cuda/device/call_setup.cuh, src/cuda/dispatch/dispatch.cu, push.cuh,
// fan_out.cuh, src/cuda/combine/reduce.cuh, sum.cuh). Counts travel with the words of a plan call,
// and with replicas once more, with words of their own (src/cuda/plan/balance/call.cpp, swap.cu);
// records, rows, weights and sums have one place each, which the next call uses again.
//
// Checked: who takes counts, records, weights, rows or sums gets those of this call, or of its plan,
// also while a rank is late and others have broken off; nothing is written to a rank that still
// reads what was there; no rank gets a result of a call that another refuses; every wait ends.
//
// Calls are plans, with replicas or without, dispatches by the latest plan, and combines with weights
// from the tokens' ranks: those are sent first, then sums come back. An output that its sources
// write themselves (direct) is read by its owner until the owner makes its next call; so it is read
// last of all, which covers staging, too. Abstracted: see gpu.pml.
//
// Mutations, each of which makes the check fail:
//   ONE_WORD_AREA          words have one place instead of two
//   NO_FENCE               signals are raised before what they announce is visible
//   NO_WORD_WAIT           a call goes on without the words of all ranks
//   NO_WAIT_WHEN_GIVEN_UP  a call that is given up does not wait for the words
//   NO_ROW_WAIT            rows and sums are taken before their signals
//   NO_WEIGHT_WAIT         weights are taken before their signals
//   NO_RECORD_WAIT         records are read before their signals
//   WORD_BEFORE_END        a rank's word of the next call is sent before it has read its rows
//   NEVER_SILENT           all calls queued behind one that was broken off are refused by a word
//   ONE_SECOND_AREA        words of second halves have one place instead of two
//   SECOND_IN_PLACE        words of a call's second half have the place of its first words
//   NO_SECOND_WAIT         a second half goes on without the words of all ranks
//   GOES_ON_WHEN_REFUSED   a second half follows though a rank refuses the call in the first
#define NUM_KINDS 7
#define FIRST_ROW_KIND 4
#define FIRST_LOOSE_KIND 7
#define NUM_SIGNALS 7
#define IS_RIGHT_NUMBER(number) ((number) == is_second)
#include "gpu.pml"

#define RECORDS(owner, writer) CELL(4, owner, writer)
#define WEIGHT(owner, writer) CELL(5, owner, writer)
#define ROW(owner, writer) CELL(6, owner, writer)
#define RECORDS_SIGNAL(owner, writer) SIGNAL(4, owner, writer)
#define WEIGHT_SIGNAL(owner, writer) SIGNAL(5, owner, writer)
#define ROW_SIGNAL(owner, writer) SIGNAL(6, owner, writer)
#define PLAN 0
#define DISPATCH 1
#define COMBINE 2
byte op[C + 1];    // of each call; the first is a plan
bool is_balanced;  // plans have replicas, all of them or none
byte plan[C + 1];  // the call that made its plan

#ifdef NO_ROW_WAIT
#define HAS_ROW(peer) true
#else
#define HAS_ROW(peer) ((peer) == me || ROW_SIGNAL(me, peer) >= e)
#endif
#ifdef NO_WEIGHT_WAIT
#define HAS_WEIGHT(peer) true
#else
#define HAS_WEIGHT(peer) ((peer) == me || WEIGHT_SIGNAL(me, peer) >= e)
#endif
#ifdef NO_RECORD_WAIT
#define HAS_RECORDS(peer) true
#else
#define HAS_RECORDS(peer) ((peer) == me || RECORDS_SIGNAL(me, peer) >= plan[e])
#endif
#define TAKE_RECORDS \
  TAKE(ALL_OF(HAS_RECORDS), FOR_PEERS(assert(visible[RECORDS(me, peer)] == plan[e])))

// Stores something at every peer, and raises its signal there.
#define SEND(cell, its_signal)                       \
  atomic {                                           \
    is_good -> FOR_PEERS(store(cell(peer, me), e))   \
  };                                                 \
  d_step {                                           \
    FENCE(ROWS, me) -> FOR_PEERS(its_signal(peer, me) = e) \
  }

proctype rank(byte me) RUNS {
  RANK_STATE;
  bool has_plan;  // the latest plan was made
  bool has_rows;  // the caller has the rows of call e
  {
    do
    :: e == C || stopped[me] == BROKEN -> break
    :: e < C ->
       atomic {
         d_step {
           if  // the caller reads them as late as it may
           :: has_rows -> FOR_PEERS(assert(visible[ROW(me, peer)] == e))
           :: else
           fi;
           has_rows = false
         };
         begin_call();
         is_good = is_good && (op[e] == PLAN || has_plan);
         store_words(0)
       };
       if
       :: !has_told -> raise_words()
       :: else
       fi;
       if  // eager combine reads records before it has the words (eager.pml has its rows)
       :: op[e] == COMBINE -> TAKE_RECORDS
       :: else
       fi;
       accept_words();
       if
       :: op[e] == PLAN && is_balanced && GOES_ON ->
          atomic {
            is_second = true;
            store_words(1)
          };
          if
          :: !has_told -> raise_words()
          :: else
          fi;
          accept_words()
       :: else
       fi;
       if
       :: op[e] == PLAN ->
          has_plan = is_good;
          if
          :: is_good -> IS_RIGHT; SEND(RECORDS, RECORDS_SIGNAL)
          :: else
          fi
       :: else ->
          if
          :: op[e] == DISPATCH -> TAKE_RECORDS
          :: is_good && op[e] == COMBINE ->
             SEND(WEIGHT, WEIGHT_SIGNAL);
             TAKE(ALL_OF(HAS_WEIGHT), FOR_PEERS(assert(visible[WEIGHT(me, peer)] == e)))
          :: else
          fi;
          if
          :: is_good -> SEND(ROW, ROW_SIGNAL)
          :: else
          fi;
          send_next_words(0);
          TAKE(ALL_OF(HAS_ROW), IS_RIGHT; has_rows = true)
       fi;
       end_call()
    od
  } unless { is_dead && me == VICTIM };
  has_ended[me] = true
}

init {
  atomic {
    byte i;
    op[1] = PLAN;
    plan[1] = 1;
    if
    :: is_balanced = true
    :: true
    fi;
    for (i : 2 .. C) {
      if
      :: op[i] = PLAN; plan[i] = i
      :: op[i] = DISPATCH; plan[i] = plan[i - 1]
      :: op[i] = COMBINE; plan[i] = plan[i - 1]
      fi
    };
    START
  }
}
