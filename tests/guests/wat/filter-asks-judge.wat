;; A filter that calls the judge.
;;! contract 0.2.0
;;! world import querl:plugin/judge@0.1.0;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/filters@0.1.0;
(module
  (import "querl:plugin/judge@0.1.0" "ask" (func $ask (param i32 i32 i32)))
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  (func (export "querl:plugin/filters@0.1.0#check-batch") (param i32 i32) (result i32)
    (call $ask (i32.const 2048) (i32.const 1) (i32.const 512))
    (i32.const 256))
)
