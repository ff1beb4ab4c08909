;; Returns 200 MB of packed results.
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
;;! world export querl:plugin/packed-rewards@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include packed
  ;; Never called: the host prefers the packed form.
  (func (export "querl:plugin/rewards@0.1.0#score-batch") (param i32 i32) (result i32)
    (unreachable))
  (func $odd (param $results i32) (param $n_bytes i32) (result i32)
    (drop (memory.grow (i32.const 3060)))
    (i32.const 200000000))
)
