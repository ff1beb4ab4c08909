;; Requests a gigabyte of random bytes in one call.
;;! package package wasi:random@0.2.6 { interface random { get-random-bytes: func(len: u64) -> list<u8>; } }
;;! world import wasi:random/random@0.2.6;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "wasi:random/random@0.2.6" "get-random-bytes" (func $random (param i64 i32)))
  ;;! include reward
  (func $odd (param i32)
    (call $random (i64.const 1000000000) (i32.const 512)))
)
