;; Counts tokens once, and scores 1 divided by their number.
;;! contract 0.2.0
;;! world import querl:plugin/tokens@0.1.0;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "querl:plugin/tokens@0.1.0" "count" (func $count (param i32 i32 i32)))
  ;;! include reward
  (func $odd (param $result i32)
    (call $count (i32.const 1280) (i32.const 5) (i32.const 512))
    (if (i32.load8_u (i32.const 512)) (then (unreachable)))
    (f64.store offset=8 (local.get $result) (f64.div (f64.const 1) (f64.convert_i32_u (i32.load (i32.const 516))))))
)
