;; Exports both the packed and the JSON form of a reward.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
;;! world export querl:plugin/packed-rewards@0.1.0;
;;! world export querl:plugin/json-rewards@0.1.0;
(module
  ;;! include reward
  (func $odd (param i32))
  (func (export "querl:plugin/packed-rewards@0.1.0#score-packed") (param i32 i32) (result i32)
    (i32.const 256))
  (func (export "querl:plugin/json-rewards@0.1.0#score-json") (param i32 i32) (result i32)
    (i32.const 256))
)
