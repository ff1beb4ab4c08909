;; A valid plugin built with a later 0.1.x, which calls only functions of 0.1.0.
;;! contract 0.1.7
;;! adds log flush: func();
;;! adds rewards explain: func() -> string;
(module
  (import "querl:plugin/log@0.1.0" "log" (func $log (param i32 i32 i32)))
  ;;! include reward
  (func (export "querl:plugin/rewards@0.1.0#explain") (result i32)
    (i32.const 128))
  (func $odd (param i32)
    (call $log (i32.const 1) (i32.const 1024) (i32.const 5)))
)
