;; Returns packed a score with 1,300,000 components without names: 12 bytes each in the guest, several times as many in the host.
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
    (drop (memory.grow (i32.const 250)))
    (i32.store (local.get $results) (i32.const 1))
    (i32.store offset=13 align=1 (local.get $results) (i32.const 1300000))
    (i32.const 15600017))
)
