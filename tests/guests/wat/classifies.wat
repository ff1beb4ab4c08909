;; A style scorer: calls the style model once per dialogue, and endlessly if the dialogue's id starts with `x`.
;;! world import querl:plugin/style-model@0.1.0;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/style-scores@0.1.0;
(module
  (import "querl:plugin/style-model@0.1.0" "classify" (func $classify (param i32 i32 i32)))
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;; A dialogue has 16 bytes: id at 0, turns at 8. The result has the layout of a reward: a total of 0.5 without components.
  (func (export "querl:plugin/style-scores@0.1.0#score-batch") (param $dialogues i32) (param $n i32) (result i32)
    (local $results i32) (local $result i32)
    (local.set $results (call $allocate
      (i32.const 0) (i32.const 0) (i32.const 8) (i32.mul (local.get $n) (i32.const 24))))
    (i32.store (i32.const 256) (local.get $results))
    (i32.store (i32.const 260) (local.get $n))
    (local.set $result (local.get $results))
    (loop $next
      (if (local.get $n)
        (then
          (loop $again
            (call $classify
              (i32.load offset=8 (local.get $dialogues)) (i32.load offset=12 (local.get $dialogues)) (i32.const 512))
            (br_if $again (i32.eq (i32.load8_u (i32.load (local.get $dialogues))) (i32.const 120))))
          (i32.store (local.get $result) (i32.const 0))
          (f64.store offset=8 (local.get $result) (f64.const 0.5))
          (i64.store offset=16 (local.get $result) (i64.const 0))
          (local.set $result (i32.add (local.get $result) (i32.const 24)))
          (local.set $dialogues (i32.add (local.get $dialogues) (i32.const 16)))
          (local.set $n (i32.sub (local.get $n) (i32.const 1)))
          (br $next))))
    (i32.const 256))
)
