;; Requests handles in a loop and returns none.
;;! package package wasi:io@0.2.6 { interface poll { resource pollable; } }
;;! package package wasi:clocks@0.2.6 { interface monotonic-clock {
;;! package   use wasi:io/poll@0.2.6.{pollable}; subscribe-duration: func(when: u64) -> pollable; } }
;;! world import wasi:clocks/monotonic-clock@0.2.6;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "wasi:clocks/monotonic-clock@0.2.6" "subscribe-duration" (func $subscribe (param i64) (result i32)))
  ;;! include reward
  (func $odd (param i32)
    (loop $again
      (drop (call $subscribe (i64.const 1)))
      (br $again)))
)
