  ;; There are no settings. What is at 128 is never written: 0, an ok.
  (func (export "querl:plugin/info@0.1.0#check-settings") (result i32)
    (i32.const 128))
