;; Calls the host function for counting tokens endlessly.
;;! contract 0.2.0
;;! world import querl:plugin/tokens@0.1.0;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "querl:plugin/tokens@0.1.0" "count" (func $count (param i32 i32 i32)))
  ;;! include reward
  (func $odd (param i32)
    (loop $again
      (call $count (i32.const 1280) (i32.const 5) (i32.const 512))
      (br $again)))
)
