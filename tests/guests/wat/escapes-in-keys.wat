;; Requests settings whose keys contain terminal escapes and reverse the following text.
;;! world import querl:plugin/settings@0.1.0;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "querl:plugin/settings@0.1.0" "get" (func $get (param i32 i32 i32)))
  ;;! include memory
  ;;! include describe
  ;;! include range
  ;;! include scores
  (data (i32.const 1400) "\1b[2Jred")
  (data (i32.const 1420) "a\e2\80\aeb")
  (data (i32.const 1440) "depth")
  (func (export "querl:plugin/info@0.1.0#check-settings") (result i32)
    (call $get (i32.const 1400) (i32.const 7) (i32.const 512))
    (call $get (i32.const 1420) (i32.const 5) (i32.const 512))
    (call $get (i32.const 1440) (i32.const 5) (i32.const 512))
    (i32.const 128))
  (func $odd (param i32))
)
