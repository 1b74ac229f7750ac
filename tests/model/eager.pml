// SPDX-License-Identifier: Apache-2.0
// Eager rows on GPUs: plan and dispatch in one launch (src/cuda/dispatch/fused.cu, eager.cuh,
// push.cuh, src/cuda/plan/fused.cuh, swap_routing.cuh), and combine of few tokens
// (src/cuda/combine/call.cpp, combine.cu, reduce.cuh, sum.cuh). Rows, and routing in tagged words
// (src/cuda/device/tagged.cuh), go to one of two areas by the parity of the epoch, before any
// handshake of their call has come. Weights of a scaled combine are such words in the same areas:
// they go out as early, and a rank sends its rows once it has them of all.
//
// Checked: who takes rows, routing, weights or a word for those of a call gets those of that call,
// also while a rank is late and others have broken off; no rank gets a result of a call that another
// refuses; every wait ends.
//
// In a fused launch the handshake, the routing and the rows belong to different warps, so that none
// of their fences covers the others' stores. All of them are stored as early as they may be. What
// is sent may be a launch of its own, and the receive another (receive_open): nothing is done
// between the two, so that they are the steps of one launch in their order.
// Abstracted: see gpu.pml; also the plan itself and the slots of rows: what counts is that all
// routing is of this call.
//
// Mutations, each of which makes the check fail:
//   ONE_ROW_AREA            rows have one area instead of two
//   ONE_ROUTE_AREA          routing and weights have one area instead of two
//   ONE_WORD_AREA           words have one place instead of two
//   NO_FENCE                signals are raised before what they announce is visible
//   NO_WORD_WAIT            a call goes on without the words of all ranks
//   NO_WAIT_WHEN_GIVEN_UP   a call that is given up does not wait for the words
//   NO_ROW_WAIT             rows are taken before their signals
//   NO_ROUTE_TAG            routing and weights are taken without their epoch
//   SEND_BEFORE_RECEIVE     a launch sends the next call before this one is received
//   WORD_BEFORE_END         a rank's word of the next call is sent before it has read its rows
//   PUSH_WHEN_STOPPED       rows and routing are pushed in calls queued behind one that was broken off
//   NEVER_SILENT            all calls queued behind one that was broken off are refused by a word
//   EXPIRED_STAYS_GIVEN_UP  a word that does not come in a call that is given up is forgiven
#define NUM_KINDS 6
#define FIRST_ROW_KIND 2
#define FIRST_LOOSE_KIND 4
#define NUM_SIGNALS 4
#include "gpu.pml"

#ifdef ONE_ROW_AREA
#define ROW(e, owner, writer) CELL(2, owner, writer)
#else
#define ROW(e, owner, writer) CELL(2 + (e) % 2, owner, writer)
#endif
#ifdef ONE_ROUTE_AREA
#define ROUTE(e, owner, writer) CELL(4, owner, writer)
#else
#define ROUTE(e, owner, writer) CELL(4 + (e) % 2, owner, writer)
#endif
#define FUSED 0
#define COMBINE 1
bit op[C + 1];   // of each call
bool is_scaled;  // combines are, all of them or none, with weights in place of routing

#define ROW_SIGNAL(owner, writer) SIGNAL(2 + op[e], owner, writer)
#ifdef NO_ROW_WAIT
#define HAS_ROW(peer) true
#else
#define HAS_ROW(peer) ((peer) == me || ROW_SIGNAL(me, peer) >= e)
#endif
#ifdef NO_ROUTE_TAG
#define HAS_ROUTE(peer) ((peer) == me || visible[ROUTE(e, me, peer)] != 0)
#else
#define HAS_ROUTE(peer) ((peer) == me || visible[ROUTE(e, me, peer)] == e)
#endif

// A fused launch writes ahead also in a call that all ranks give up (may_write_ahead).
#define IS_LAUNCHED (op[e] == FUSED && refuser[e] != me)
#ifdef PUSH_WHEN_STOPPED
#define WRITES_AHEAD IS_LAUNCHED
#else
#define WRITES_AHEAD (IS_LAUNCHED && !IS_BEHIND)
#endif
#define SCALES (op[e] == COMBINE && is_scaled)
#define IS_PUSHING (is_good && !SCALES || WRITES_AHEAD)

// What needs nothing of the peers: all but the rows that their weights scale.
inline store_first() {
  needs_weights = is_good && SCALES;
  has_pushed = !IS_PUSHING;
  if
  :: IS_PUSHING -> FOR_PEERS(store(ROW(e, peer, me), e))
  :: else
  fi;
  if
  :: needs_weights || WRITES_AHEAD -> FOR_PEERS(store(ROUTE(e, peer, me), e))
  :: else
  fi
}

// A tag is read together with what it stands for, so that this is one step.
#define CHECK_ROUTES FOR_PEERS(assert(visible[ROUTE(e, me, peer)] == e))
#define SCALE_ROWS                       \
  CHECK_ROUTES;                          \
  FOR_PEERS(store(ROW(e, peer, me), e)); \
  needs_weights = false;                 \
  has_pushed = false

inline raise_rows() {
  d_step {
    !has_pushed && FENCE(ROWS, me) ->
    FOR_PEERS(ROW_SIGNAL(peer, me) = e);
    has_pushed = true
  }
}

// Mutation: what the next call sends is not kept until this one is received.
inline send_next() {
#ifdef SEND_BEFORE_RECEIVE
  if
  :: is_good && e < C && op[e] == FUSED ->
     atomic {
       e++;
       store_words(0);
       store_first()
     };
     do
     :: raise_words()
     :: raise_rows()
     :: has_told && has_pushed -> break
     od;
     e--
  :: else
  fi
#else
  skip
#endif
}

inline take_routes() {
  if
  :: op[e] == FUSED -> TAKE(ALL_OF(HAS_ROUTE), CHECK_ROUTES)
  :: needs_weights ->
     TAKE(ALL_OF(HAS_ROUTE), SCALE_ROWS);
     needs_weights = false;
     if
     :: !has_pushed -> raise_rows()
     :: else
     fi
  :: else
  fi
}

inline take_rows() {
  TAKE(ALL_OF(HAS_ROW), FOR_PEERS(assert(visible[ROW(e, me, peer)] == e)); IS_RIGHT)
}

proctype rank(byte me) RUNS {
  RANK_STATE;
  bool needs_weights;  // of the peers, before it stores its rows
  {
    do
    :: e == C || stopped[me] == BROKEN -> break
    :: e < C ->
       atomic { begin_call(); store_words(0); store_first() };
       do
       :: raise_words()
       :: raise_rows()
       :: d_step { needs_weights && ALL_OF(HAS_ROUTE) -> SCALE_ROWS }
       :: has_told && has_pushed -> break
       od;
       send_next();
       accept_words();
       send_next_words(0);
       take_routes();
       take_rows();
       end_call()
    od
  } unless { is_dead && me == VICTIM };
  has_ended[me] = true
}

init {
  atomic {
    byte i;
    if
    :: is_scaled = true
    :: true
    fi;
    for (i : 1 .. C) {
      if
      :: op[i] = FUSED
      :: op[i] = COMBINE
      fi
    };
    START
  }
}
