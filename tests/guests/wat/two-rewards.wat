;; Exports both a reward of episodes and a reward of groups.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
;;! world export querl:plugin/group-rewards@0.1.0;
(module
  ;;! include reward
  (func $odd (param i32))
  (func (export "querl:plugin/group-rewards@0.1.0#range") (result i32)
    (i32.const 192))
  (func (export "querl:plugin/group-rewards@0.1.0#score-group") (param i32 i32) (result i32)
    (i32.const 256))
)
