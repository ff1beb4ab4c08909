;; Calls an interface that was added in a later 0.1.x.
;;! contract 0.1.7
;;! package interface tokens { count: func(text: string) -> u32; }
;;! world import querl:plugin/tokens@0.1.0;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "querl:plugin/tokens@0.1.0" "count" (func $count (param i32 i32) (result i32)))
  ;;! include reward
  (func $odd (param i32)
    (drop (call $count (i32.const 1024) (i32.const 5))))
)
