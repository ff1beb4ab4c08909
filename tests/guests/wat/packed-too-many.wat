;; Returns packed results with a stated number of four billion.
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
    (i32.store (local.get $results) (i32.const -1))
    (local.get $n_bytes))
)
