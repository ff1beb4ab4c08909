;; Calls the judge once.
;;! contract 0.2.0
;;! world import querl:plugin/judge@0.1.0;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "querl:plugin/judge@0.1.0" "ask" (func $ask (param i32 i32 i32)))
  ;;! include reward
  (func $odd (param i32)
    (call $ask (i32.const 2048) (i32.const 1) (i32.const 512)))
)
