;; Returns JSON of a million nested lists.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
;;! world export querl:plugin/json-rewards@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include json
  ;; Never called: the host prefers the JSON form.
  (func (export "querl:plugin/rewards@0.1.0#score-batch") (param i32 i32) (result i32)
    (unreachable))
  (func $odd (result i32)
    (drop (memory.grow (i32.const 17)))
    (memory.fill (i32.const 131072) (i32.const 91) (i32.const 1000000))
    (global.set $n_odd_bytes (i32.const 1000000))
    (i32.const 131072))
)
