// SPDX-License-Identifier: Apache-2.0
// Calls between domains of GPUs that are cut short: by a fault in the domain, by a transfer that
// fails, by a loss that stops the kernels (src/hosts/call.cpp, combine.cpp, message_rows.cu,
// message_transfer.cpp).
//
// In each call rows go to another domain and come from it, and a round hands them on inside this
// domain. Every second one is a combine: its rows are weights, the round adds up sums, which go
// back, and the other domain's sums are added to this one's. The host queues all of a call at once,
// in two streams that wait for each other by events, and a thread moves messages.
//
// Checked: what a round hands on and what the other domain takes are of this call; if the host
// finds nothing wrong after calls have ended, their sums are right; every wait ends.
//
// Abstracted: one rank and, in another domain, a peer with which nothing goes wrong but that it may
// be gone. What a round needs of the other ranks of its domain is there, or the round is cut short.
// A transfer may fail at any time, as at a deadline.
//
// Mutations, each of which makes the check fail:
//   PACKS_ANYWAY      sums of a round that was cut short are sent
//   NO_STOP           rounds behind a transfer that has failed run all the same
//   COUNTS_FIRST      a transfer that fails lets the GPU go on before it says so
//   KERNELS_FIRST     a loss stops the kernels before it is marked
//   LOOKS_EARLY       the host looks for that mark before the kernels have ended
//   IGNORES_TRANSFER  the host does not ask whether a transfer has failed
//   ANY_MARK          what an earlier call has packed counts as packed
//   NO_COPY_WAIT      a call begins while copies of the one before it run
#ifndef C
#define C 2  // calls
#endif

#define HAS_SUMS (e % 2 == 0)
#define ROWS 0
#define SUMS 1
#define EACH(name) byte name[2]

// How many calls have come so far.
byte begun;      // the handshake
byte queued;
byte moved;      // both transfers have ended
byte copied_up;  // the copy stream has brought the rows
byte rounds;     // the round for the other domain has ended
byte copied;     // the copy stream has ended
byte ended;      // the caller's stream has
bit has_left;
byte peer_begun;
bit peer_has_left;

bit is_stopped;  // the kernels: what runs then, or begins, does nothing
bit has_record;  // of a fault, for the host
bit is_marked;   // ranks were lost
bit has_failed;  // a transfer, for the GPU
bit is_failed;   // the same, for the host
bit is_wrong;    // sums of a call that has ended

// What lies in memory: the call that it is right for; 0: none.
byte rows;   // from the other domain
byte sums;   // for it
byte own;    // of this domain
byte parts;  // from the other domain
EACH(message);
EACH(staging);
EACH(there);  // what the peer has got

// Likewise, of signals and marks.
EACH(packed);
EACH(come);
EACH(peer_come);
EACH(counted);  // for the GPU: it has come, or never will

#ifdef ANY_MARK
#define IS_PACKED(kind) (packed[kind] != 0)
#else
#define IS_PACKED(kind) (packed[kind] == e)
#endif

inline pack(kind, what) {
  message[kind] = what;
  if
#ifdef PACKS_ANYWAY
  :: true -> packed[kind] = e
#else
  :: !is_stopped -> packed[kind] = e
  :: is_stopped
#endif
  fi
}

// A stream, or the thread, takes up the next call, or there is none.
#define FOR_CALLS(steps)                        \
  do                                            \
  :: e <= C && queued >= e -> steps; e++        \
  :: e > C || (has_left && queued < e) -> break \
  od

inline copy_call() {
  ended >= e - 1;
  pack(ROWS, e);
  counted[ROWS] >= e;
  rows = staging[ROWS];
  copied_up = e;
  if
  :: HAS_SUMS ->
     rounds >= e;
     pack(SUMS, sums);
     counted[SUMS] >= e;
     parts = staging[SUMS]
  :: else
  fi;
  copied = e
}

#ifdef NO_STOP
#define STOPS_FOR_IT false
#else
#define STOPS_FOR_IT has_failed
#endif
inline stop_if_failed() {
  if
  :: STOPS_FOR_IT -> is_stopped = true
  :: else
  fi
}

// Whole, cut short by a fault in the domain, or stopped.
inline run_round(result, hands_on) {
  if
  :: d_step {
       !is_stopped ->
       assert(!(hands_on) || rows == e);
       result = e
     }
  :: d_step {
       !is_stopped ->
       has_record = true;
       is_stopped = true;
       result = 0
     }
  :: is_stopped -> result = 0
  fi
}

inline caller_call() {
  copied_up >= e;
  stop_if_failed();
  run_round(sums, true);
  rounds = e;
  run_round(own, false);
  copied >= e;
  stop_if_failed();
  d_step {
    is_wrong = is_wrong || own != e || (HAS_SUMS && parts != e);
    ended = e
  }
}

inline give_up(kind) {
#ifdef COUNTS_FIRST
  counted[kind] = e;
  has_failed = true;
#else
  has_failed = true;
  counted[kind] = e;
#endif
  is_failed = true
}

inline transfer(kind) {
  has_sent = false;
  has_come = false;
  do
  :: has_sent && has_come -> break
  :: !has_sent || !has_come ->
     give_up(kind);
     break
  :: !is_failed && !has_sent && IS_PACKED(kind) ->
     d_step {
       there[kind] = message[kind];
       peer_come[kind] = e;
       has_sent = true
     }
  :: !is_failed && !has_come && come[kind] >= e ->
     d_step {
       counted[kind] = e;
       has_come = true
     }
  od
}

inline move_call() {
  transfer(ROWS);
  if
  :: HAS_SUMS -> transfer(SUMS)
  :: else
  fi;
  moved = e
}

active proctype copy_stream() {
  byte e = 1;
  FOR_CALLS(copy_call())
}

active proctype caller_stream() {
  byte e = 1;
  FOR_CALLS(caller_call())
}

active proctype transfers() {
  byte e = 1;
  bit has_sent;
  bit has_come;
  FOR_CALLS(move_call())
}

#ifdef IGNORES_TRANSFER
#define IS_GOOD (!has_record && !is_marked)
#elif defined(LOOKS_EARLY)
#define IS_GOOD (!has_record && !was_marked && !is_failed)
#else
#define IS_GOOD (!has_record && !is_marked && !is_failed)
#endif

active proctype host() {
  byte e = 0;
  bit was_marked;
  do
  :: e < C ->
     moved == e;
#ifndef NO_COPY_WAIT
     copied == e;
#endif
     if
     :: IS_GOOD
     :: else -> break
     fi;
     begun = e + 1;
     if
     :: peer_begun > e
     :: peer_has_left -> break
     fi;
     e++;
     queued = e
  :: e > 0 ->  // it waits for the calls, and looks
     was_marked = is_marked;
     moved == e && ended == e;
     assert(!IS_GOOD || !is_wrong);
     if
     :: IS_GOOD && e < C
     :: !IS_GOOD || e == C -> break
     fi
  od;
  has_left = true
}

// Others have agreed that ranks are lost.
active proctype loss() {
#ifdef KERNELS_FIRST
  is_stopped = true;
  is_marked = true
#else
  is_marked = true;
  is_stopped = true
#endif
}

#define IS_AT(kind) (peer_come[kind] >= e)

active proctype peer() {
  byte e = 1;
  do
  :: e <= C ->
     peer_begun = e;
     begun >= e || has_left;
     if
     :: begun >= e
     :: has_left && begun < e -> break
     fi;
     d_step {
       staging[ROWS] = e;
       come[ROWS] = e
     };
     if
     :: d_step { IS_AT(ROWS) -> assert(there[ROWS] == e) }
     :: true -> break
     fi;
     if
     :: HAS_SUMS ->
        d_step {
          staging[SUMS] = e;
          come[SUMS] = e
        };
        if
        :: d_step { IS_AT(SUMS) -> assert(there[SUMS] == e) }
        :: true -> break
        fi
     :: else
     fi;
     e++
  :: e > C -> break
  od;
  peer_has_left = true
}
