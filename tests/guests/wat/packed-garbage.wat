;; Returns packed results whose first tag is neither score nor rejection.
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
    (i32.store8 offset=4 (local.get $results) (i32.const 7))
    (local.get $n_bytes))
)
